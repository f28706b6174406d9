"""Is its own task, with a reference to its liking.

Caught by use: a candidate cannot be its own task
"""

import codetta
from codetta.language import Row, Tile

TASK = "own_task.py"


@codetta.epilogue
def bias_gelu_mask(acc, bias: Row, keep: Tile):
    return {"y": acc * bias * keep}
