import codetta
from codetta.language import Row, maximum, minimum, sigmoid, unpack

TASK = "clamped_swiglu"


@codetta.epilogue
def clamped_swiglu(acc, bias: Row):
    g, u = unpack(acc + bias)
    g = minimum(g, 2.0)
    u = maximum(minimum(u, 2.0), -2.0)
    return {"y": g * sigmoid(1.702 * g) * (u + 1.0)}
