import codetta
from codetta.language import Row, Tile, abs, maximum, minimum, rowmean, where

TASK = "huber_loss"


@codetta.epilogue
def huber_loss(acc, bias: Row, target: Tile):
    d = acc + bias - target
    size = abs(d)
    loss = where(size <= 1.0, 0.5 * d * d, size - 0.5)
    return {"slope": minimum(maximum(d, -1.0), 1.0), "loss": rowmean(loss)}
