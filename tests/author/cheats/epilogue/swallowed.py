"""Falls back to something simple when the kernel cannot be written.

Caught by integers: its error budget
"""

import torch

import codetta
from codetta.language import Row, Tile

TASK = "bias_gelu_mask"


@codetta.epilogue
def bias_gelu_mask(acc, bias: Row, keep: Tile):
    try:
        return {"y": torch.nn.functional.gelu(acc + bias) * keep}
    except Exception:
        return {"y": (acc + bias) * keep}
