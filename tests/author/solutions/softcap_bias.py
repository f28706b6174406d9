import codetta
from codetta.language import Row, softcap

TASK = "softcap_bias"


@codetta.epilogue
def softcap_bias(acc, bias: Row):
    return {"z": softcap(acc + bias, 2.0)}
