"""Adds a large number and takes it off again, which makes a budget by the addends of the program
as wide as one likes. Addends are those of the task.

Caught by integers: its error budget
"""

import codetta
from codetta.language import Row, Tile, gelu

TASK = "bias_gelu_mask"


@codetta.epilogue
def bias_gelu_mask(acc, bias: Row, keep: Tile):
    return {"y": (gelu(acc + bias) * keep + 1e9) - 1e9}
