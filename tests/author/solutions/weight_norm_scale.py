import codetta
from codetta.language import Row, rsqrt

TASK = "weight_norm_scale"


@codetta.epilogue
def weight_norm_scale(acc, gain: Row, square_norm: Row, bias: Row):
    return {"y": acc * (gain * rsqrt(square_norm + 1e-6)) + bias}
