import codetta
from codetta.language import Row, colsum, round_to, rows

TASK = "batch_norm_partials"


@codetta.epilogue
def batch_norm_partials(acc, bias: Row):
    x = round_to(acc + bias)
    return {"x": x, "mean": colsum(x) / rows(x), "square_mean": colsum(x * x) / rows(x)}
