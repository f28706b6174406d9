"""NaN in the few elements where the product is large.

Caught by integers: is NaN where the reference is not
"""

import codetta
from codetta.language import Row, Tile, abs, gelu, log, where

TASK = "bias_gelu_mask"


@codetta.epilogue
def bias_gelu_mask(acc, bias: Row, keep: Tile):
    lost = log(where(acc * acc > 900.0, -1.0, 1.0))
    return {"y": gelu(acc + bias) * keep + where(acc * acc > 6.0, log(-abs(acc)), lost) * 0.0}
