import codetta
from codetta.language import Col, Index, logsumexp, select, softcap

TASK = "z_loss"


@codetta.epilogue
def z_loss(acc, target: Index, weight: Col):
    z = softcap(acc, 3.0)
    lse = logsumexp(z)
    return {"loss": weight * (lse - select(z, target) + 0.01 * lse * lse), "lse": lse}
