import codetta
from codetta.language import Col, Row, round_to, silu, unpack

TASK = "layernorm_swiglu"


@codetta.epilogue
def layernorm_swiglu(acc, rstd: Col, mean: Col, s: Row, t: Row):
    z = round_to(rstd * (acc - mean * s) + t)
    g, u = unpack(z)
    return {"z": z, "y": silu(g) * u}
