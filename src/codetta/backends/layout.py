"""What an execution returns: the list of results of a program, their shapes and dtypes.

One description serves the kernels (what to return), the fake kernels (which shapes) and the callers
(which names). Without ``raw`` the results are the outputs in program order. With ``raw`` the stores
stay and each final is replaced by the partials it reads, component by component; a partial that
several finals share appears once, at the first of them, under its name in
``Program.partial_names``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from codetta.language.meaning import NAMED_DTYPES, operand_storage
from codetta.language.primitives import COL_REDUCTIONS, REDUCTION
from codetta.language.program import Program
from codetta.language.types import Kind

Tile = tuple[int, int]
#: (program, a, b, flat operands) -> the tile that a backend takes where the caller names none. Only
#: metadata counts: meta tensors will do.
Tiling = Callable[[Program, Tensor, Tensor, Sequence[Tensor]], Tile]
#: Tile used when the caller names none; widened to the program's granule.
DEFAULT_TILE: Tile = (128, 128)


def default_tile(program: Program) -> Tile:
    granule = program.granule
    return DEFAULT_TILE[0], -(-DEFAULT_TILE[1] // granule) * granule


@dataclass(frozen=True, slots=True)
class Result:
    """One named result: a store or a final (no components), or a raw partial.

    Attributes:
        name: the output's or the partial's.
        axes: for each dimension 'm', 'n', 'tm' (tiles over rows) or 'tn' (tiles over columns).
        width: number of columns as a multiple of N, where an axis is 'n' or 'tn'.
        dtype: storage dtype as the language names it.
        components: names of the parts of a raw partial, else ().
    """

    name: str
    axes: tuple[str, ...]
    width: Fraction
    dtype: str
    components: tuple[str, ...] = ()

    def shape(self, m: Any, n: Any, tile: Tile) -> list[Any]:
        """Sizes for an M x N accumulator; m and n may be symbolic."""
        cols = n * self.width.numerator // self.width.denominator
        tile_cols = max(1, int(tile[1] * self.width))
        sizes = {
            "m": m,
            "n": cols,
            "1": 1,
            "tm": (m + tile[0] - 1) // tile[0],
            "tn": (cols + tile_cols - 1) // tile_cols,
        }
        return [sizes[axis] for axis in self.axes]

    def storage(self, operand: torch.dtype, compute: torch.dtype) -> torch.dtype:
        if self.dtype == "operand":
            return operand_storage(operand)
        return compute if self.dtype == "accumulator" else NAMED_DTYPES[self.dtype]


_AXES = {Kind.TILE: ("m", "n"), Kind.COL: ("m",), Kind.ROW: ("n",), Kind.SCALAR: ()}


@lru_cache(maxsize=1024)
def results(program: Program, raw: bool = False) -> tuple[Result, ...]:
    """The results of an execution, in order."""
    found: list[Result] = []
    pending = dict(program.partial_names) if raw else {}
    for out in program.outputs:
        type_ = program.nodes[out.node].type
        if not (raw and type_.reduced):
            width = type_.cols if type_.has_cols else Fraction(1)
            found.append(Result(out.name, _AXES[type_.kind], width, out.dtype))
            continue
        for i in program.reachable(out.node):
            if i in pending:
                found.append(_partial(program, i, pending.pop(i)))
    return tuple(found)


def _partial(program: Program, i: int, name: str) -> Result:
    node = program.nodes[i]
    source = program.nodes[node.args[0]].type
    if node.op in COL_REDUCTIONS:
        axes = ("tm", "n" if source.has_cols else "1")
    elif node.op == "totalsum":
        axes = ("tm", "tn")
    else:
        axes = ("m" if source.has_rows else "1", "tn")
    width = source.cols if source.has_cols else Fraction(1)
    return Result(name, axes, width, "accumulator", REDUCTION[node.op].components)


@lru_cache(maxsize=4096)
def parsed(text: str) -> Program:
    """The Program of a canonical text; operators are called with texts, over and over."""
    return Program.parse(text)


def compute_dtype(a: torch.dtype, operands: Sequence[Tensor]) -> torch.dtype:
    """promote_types(float32, a, float operands): fp64 if any of them is, else fp32."""
    wide = a is torch.float64 or any(x.dtype is torch.float64 for x in operands)
    return torch.float64 if wide else torch.float32


def fake_results(
    program: Program,
    like: Tensor,
    m: Any,
    n: Any,
    operand: torch.dtype,
    compute: torch.dtype,
    tile: Sequence[int],
    raw: bool,
) -> list[Tensor]:
    """Empty tensors of the shapes and dtypes of the flat result list."""
    used = (tile[0], tile[1]) if tile else default_tile(program)
    return [
        like.new_empty(r.shape(m, n, used), dtype=r.storage(operand, compute))
        for r in results(program, raw)
        for _ in range(max(1, len(r.components)))
    ]
