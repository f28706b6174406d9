"""Computes in fp8, which bf16 outputs might hide.

Caught by integers: its error budget
"""

import codetta
from codetta.language import Row, Tile, gelu, round_to

TASK = "bias_gelu_mask"


@codetta.epilogue
def bias_gelu_mask(acc, bias: Row, keep: Tile):
    return {"y": round_to(gelu(acc + bias), "e4m3") * keep}
