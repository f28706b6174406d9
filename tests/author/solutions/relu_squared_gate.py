import codetta
from codetta.language import relu, square, unpack

TASK = "relu_squared_gate"


@codetta.epilogue
def relu_squared_gate(acc):
    g, u = unpack(acc)
    return {"y": square(relu(g)) * u}
