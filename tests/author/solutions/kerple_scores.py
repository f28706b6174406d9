import codetta
from codetta.language import Col, Row, Scalar, abs, log, rowmax

TASK = "kerple_scores"


@codetta.epilogue
def kerple_scores(acc, query: Col, key: Row, decay: Scalar, stretch: Scalar):
    s = 0.5 * acc - decay * log(1.0 + stretch * abs(query - key))
    return {"s": s, "top": rowmax(s)}
