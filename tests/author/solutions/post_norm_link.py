import codetta
from codetta.language import Row, columns, round_to, rowsum, rsqrt

TASK = "post_norm_link"


@codetta.epilogue
def post_norm_link(acc, gamma: Row):
    x = round_to(acc)
    return {"y": x * (1.0 + gamma), "r": rsqrt(rowsum(x * x) / columns(x) + 1e-6)}
