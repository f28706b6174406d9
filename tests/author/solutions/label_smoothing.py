import codetta
from codetta.language import Col, Index, Row, logsumexp, rowmean, select

TASK = "label_smoothing"


@codetta.epilogue
def label_smoothing(acc, r: Col, bias: Row, target: Index):
    z = acc * r + bias
    lse = logsumexp(z)
    return {"loss": lse - 0.9 * select(z, target) - 0.1 * rowmean(z), "lse": lse}
