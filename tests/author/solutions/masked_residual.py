import codetta
from codetta.language import Col, Tile, where

TASK = "masked_residual"


@codetta.epilogue
def masked_residual(acc, mask: Col, residual: Tile):
    return {"x": residual + where(mask > 0.5, acc, 0.0)}
