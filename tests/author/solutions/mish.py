import codetta
from codetta.language import Row, abs, exp, log, maximum, tanh

TASK = "mish"


@codetta.epilogue
def mish(acc, bias: Row):
    x = acc + bias
    softplus = maximum(x, 0.0) + log(1.0 + exp(-abs(x)))
    return {"y": x * tanh(softplus)}
