import codetta
from codetta.language import Row, relu, unpack

TASK = "reglu_bias"


@codetta.epilogue
def reglu_bias(acc, bias: Row):
    z = acc + bias
    g, u = unpack(z)
    return {"z": z, "y": relu(g) * u}
