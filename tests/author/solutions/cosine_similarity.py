import codetta
from codetta.language import Tile, rowsum, rsqrt

TASK = "cosine_similarity"


@codetta.epilogue
def cosine_similarity(acc, target: Tile):
    product, ours, theirs = rowsum(acc * target), rowsum(acc * acc), rowsum(target * target)
    return {"y": acc, "cosine": product * rsqrt(ours + 1e-6) * rsqrt(theirs + 1e-6)}
