import codetta
from codetta.language import Row, Scalar, Tile

TASK = "lora_add"


@codetta.epilogue
def lora_add(acc, bias: Row, delta: Tile, scale: Scalar):
    return {"y": acc + bias + scale * delta}
