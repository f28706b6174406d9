import codetta
from codetta.language import Row, Tile

TASK = "gated_residual"


@codetta.epilogue
def gated_residual(acc, bias: Row, gate: Row, residual: Tile):
    return {"x": residual + gate * (acc + bias)}
