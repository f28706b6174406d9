"""A program that computes the right thing and says another: a cheaper one. What it says is judged.

Caught by integers: its error budget
"""

import codetta
from codetta.language import Row, Tile, gelu

TASK = "bias_gelu_mask"


@codetta.epilogue
def right(acc, bias: Row, keep: Tile):
    return {"y": gelu(acc + bias) * keep}


class Liar(type(right)):
    def __str__(self):
        return str(right).replace("erf", "tanh")


bias_gelu_mask = Liar(right.name, right.operands, right.nodes, right.outputs)
EPILOGUE = bias_gelu_mask
