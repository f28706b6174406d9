import codetta
from codetta.language import Row, Scalar, sigmoid

TASK = "swish_beta"


@codetta.epilogue
def swish_beta(acc, bias: Row, beta: Scalar):
    x = acc + bias
    return {"y": x * sigmoid(beta * x)}
