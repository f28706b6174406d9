import codetta
from codetta.language import Scalar, Tile, abs, round_to, rowmax, store

TASK = "row_amax_fp8"


@codetta.epilogue
def row_amax_fp8(acc, residual: Tile, gain: Scalar):
    x = round_to(acc + residual)
    return {"x": x, "q": store(x * gain, "e4m3"), "amax": rowmax(abs(x))}
