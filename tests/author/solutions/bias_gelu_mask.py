import codetta
from codetta.language import Row, Tile, gelu

TASK = "bias_gelu_mask"


@codetta.epilogue
def bias_gelu_mask(acc, bias: Row, keep: Tile):
    return {"y": gelu(acc + bias) * keep}
