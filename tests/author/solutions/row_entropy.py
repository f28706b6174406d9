import codetta
from codetta.language import Scalar, exp, logsumexp, rowmax

TASK = "row_entropy"


@codetta.epilogue
def row_entropy(acc, beta: Scalar):
    z = acc * beta
    lse, expected = logsumexp(z, z)
    return {"entropy": lse - expected, "confidence": exp(rowmax(z) - lse)}
