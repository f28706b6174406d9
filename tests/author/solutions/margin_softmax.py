import codetta
from codetta.language import Col, Index, Row, logsumexp, onehot, select

TASK = "margin_softmax"


@codetta.epilogue
def margin_softmax(acc, row_inverse: Col, class_inverse: Row, target: Index):
    cosine = row_inverse * acc * class_inverse
    z = 16.0 * (cosine - 0.2 * onehot(target, acc))
    return {"z": z, "loss": logsumexp(z) - select(z, target)}
