"""The backward of a program as something to run: passes, copies, and what they read.

:func:`codetta.language.vjp.vjp` derives the passes. Here the copies are taken out of them: a
gradient that is an incoming cotangent as it stands (of a residual, of a plain store) costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from codetta.errors import NotDifferentiable
from codetta.language.program import Program
from codetta.language.types import Kind
from codetta.language.vjp import Backward
from codetta.language.vjp import vjp as derive


def vjp(program: Program, wrt: Iterable[str] | None = None) -> Backward:
    """The derived backward of a program; printing it shows its passes and GEMMs.

    Args:
        wrt: names to differentiate by, "acc" for a and b; by default everything differentiable.
    """
    if wrt is None:
        names = [o.name for o in program.operands if o.kind in _DIFFERENTIABLE]
        wrt = [*(["acc"] if program.has_acc else []), *names]
    return derive(program, wrt)


_DIFFERENTIABLE = frozenset({Kind.TILE, Kind.ROW, Kind.COL, Kind.SCALAR})
_STORAGE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
            torch.float64: "fp64"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Schedule:
    """A derived backward, ready to run.

    Attributes:
        forward: the program to run forward; it may store ``saved_acc`` in addition.
        passes: programs whose outputs are all computed; bare copies have become ``copies``.
        copies: gradient name -> the array that it equals up to its dtype.
        reads: names of the arrays that the passes read, cotangents and finals of passes excepted.
    """

    forward: Program
    passes: tuple[Program, ...]
    copies: tuple[tuple[str, str], ...]
    reads: frozenset[str]


@lru_cache(maxsize=1024)
def schedule(
    program: Program,
    wrt: tuple[str, ...],
    active: tuple[str, ...],
    dtypes: tuple[tuple[str, str], ...],
) -> Schedule:
    """Backward of ``program`` by ``wrt`` when the outputs ``active`` have cotangents."""
    backward = derive(program, wrt, cotangents=active, dtypes=dict(dtypes))
    passes: list[Program] = []
    copies: list[tuple[str, str]] = []
    for p in backward.passes:
        computed = []
        for out in p.outputs:
            node = p.nodes[out.node]
            if node.op == "operand" and node.attr("name").startswith("d_"):
                copies.append((out.name, node.attr("name")))
            else:
                computed.append(out)
        if len(computed) == len(p.outputs):
            passes.append(p)
        elif computed:
            passes.append(Program.build(p.name, p.operands, p.nodes, computed, allow_unused=True))
    reads = frozenset(o.name for p in passes for o in p.operands if not _made_in_backward(o.name))
    return Schedule(backward.forward, tuple(passes), tuple(copies), reads)


def _made_in_backward(name: str) -> bool:
    return name.startswith(("d_", "saved_pass"))


def differentiated(
    program: Program, operands: Sequence[Tensor], need_acc: bool, need: Sequence[bool]
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Names to differentiate by, and the storage dtypes of the gradients of tiles."""
    wrt = ["acc"] if need_acc else []
    dtypes = []
    arrays = iter(zip(operands, need, strict=True))
    for operand in program.operands:
        x, wanted = next(arrays)
        if operand.kind is Kind.ROTARY:
            next(arrays)
        if not wanted:
            continue
        if operand.kind not in _DIFFERENTIABLE:
            raise NotDifferentiable(
                operand=operand.name, kind=operand.kind.value, program=program.name
            )
        wrt.append(operand.name)
        if operand.kind is Kind.TILE:
            dtypes.append((operand.name, _STORAGE[x.dtype]))
    return tuple(wrt), tuple(dtypes)
