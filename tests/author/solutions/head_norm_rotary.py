import codetta
from codetta.language import Rotary, Row, group_mean, rotate, rsqrt, ungroup

TASK = "head_norm_rotary"


@codetta.epilogue
def head_norm_rotary(acc, weight: Row, rope: Rotary):
    rstd = rsqrt(group_mean(acc * acc, 16) + 1e-6)
    x = acc * ungroup(rstd, 16) * weight
    return {"q": rotate(x, rope, head_dim=16, rotary_dim=8, pairs="halves")}
