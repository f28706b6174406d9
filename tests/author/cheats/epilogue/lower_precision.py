"""Computes in bf16 whatever the dtype of a.

Caught by workloads: its error budget
"""

import codetta
from codetta.language import Row, Tile, gelu, round_to

TASK = "bias_gelu_mask"


@codetta.epilogue
def bias_gelu_mask(acc, bias: Row, keep: Tile):
    return {"y": gelu(round_to(acc + bias, "bf16")) * keep}
