import codetta
from codetta.language import Tile, logsumexp

TASK = "kl_distillation"


@codetta.epilogue
def kl_distillation(acc, teacher: Tile):
    s, t = acc / 2.0, teacher / 2.0
    theirs, difference = logsumexp(t, t - s)
    return {"kl": 4.0 * (difference - theirs + logsumexp(s))}
