import math

import codetta
from codetta.language import Tile, colsum, erf, exp, pack, unpack

TASK = "geglu_backward"


@codetta.epilogue
def geglu_backward(acc, z: Tile(width=2)):
    g, u = unpack(z)
    cumulative = 0.5 * (1.0 + erf(g * math.sqrt(0.5)))
    density = exp(-0.5 * g * g) * (1.0 / math.sqrt(2.0 * math.pi))
    dz = pack(acc * u * (cumulative + g * density), acc * g * cumulative)
    return {"dz": dz, "y": g * cumulative * u, "dbias": colsum(dz)}
