"""Whether what a sum is taken of is zero outside of the matrix, so that edges need no mask.

Outside, along the reduced axis, loaded matrices and the vectors of that axis are zero. If the value
depends on nothing else it is a constant there, and one evaluation tells which. A vector of the
other axis or a scalar may be anything: even where zero times it looks like zero, an infinity would
leave NaN, so such values are never called vanishing. Nor are those of the accumulator: outside it
is a row of a times zeros, which an infinity in a makes NaN.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from codetta.backends.reference import execute
from codetta.language.meaning import Context
from codetta.language.program import Output, Program
from codetta.language.types import Kind

_ALONG = {"n": (Kind.TILE, Kind.ROW), "m": (Kind.TILE, Kind.COL)}


@lru_cache(maxsize=4096)
def vanishes(program: Program, node: int, axis: str) -> bool:
    """Whether a tile-valued node is zero beyond the edge of ``axis`` ('n' or 'm')."""
    below = [program.nodes[i] for i in program.reachable(node)]
    named = [x.attr("name") for x in below if x.op == "operand"]
    live = any(program.operand(name).kind not in _ALONG[axis] for name in named)
    if live or any(x.op in ("acc", "extent") for x in below):
        return False
    whole = [Output("x", node, "accumulator")]
    used = [program.operand(name) for name in dict.fromkeys(named)]
    part = Program.build("outside", used, program.nodes, whole)
    m, n = 1, program.granule
    ctx = Context(m, n, torch.float32, torch.float32, torch.device("cpu"))
    zeros = {
        o.name: torch.zeros(
            m if o.type.has_rows else 1,
            int(n * o.width) if o.type.has_cols else 1,
            device="cpu",  # whatever the default device is
        )
        for o in part.operands
    }
    return not bool(execute(part, ctx, zeros, acc=None)[0]["x"].any())
