"""Bytes of the values of a Schedule, from types alone: what traffic and memory are counted in.

Matrices are in the operand dtype, vectors made by finalizers and partials in the accumulator's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from codetta.backends.layout import Tile, Tiling, default_tile, results
from codetta.language.meaning import NAMED_DTYPES
from codetta.language.types import Kind, Type
from codetta.plan.grouping import FINALIZE, GEMM, MOVE, VIEW
from codetta.plan.kernels import Kernel
from codetta.plan.plan import Plan


def rows_of(kernel: Kernel, m: int) -> int:
    """M of a kernel, for m tokens."""
    return m if kernel.rows == "M" else int(kernel.rows)


class Sizes:
    """Bytes by reference, at M = ``tokens`` in ``dtype``.

    Args:
        plan: what is computed.
        kernels: those that compute it, in any order.
        tokens: M.
        dtype: of matrices.
        vector_dtype: of what finalizers write; by default fp32 or wider.
        positions: rows of the rotary tables; by default as many as tokens.
        tiling: of the backend that runs the kernels, for the number of raw partials; by default the
            reference's, one tile for all.
    """

    def __init__(
        self,
        plan: Plan,
        kernels: Sequence[Kernel],
        tokens: int,
        dtype: torch.dtype,
        vector_dtype: torch.dtype | None = None,
        positions: int | None = None,
        tiling: Tiling | None = None,
    ) -> None:
        self.tiling = tiling
        self.plan, self.tokens, self.positions = plan, tokens, positions or tokens
        self.operand = dtype
        self.compute = vector_dtype or torch.promote_types(torch.float32, dtype)
        self.kinds = {k.root: k.kind for k in kernels}
        #: bytes of the raw partials of each reduction
        self.partials = {
            w: size
            for k in kernels
            if k.program is not None
            for w, size in zip(k.writes, self.written(k), strict=True)
            if w < 0
        }

    def written(self, kernel: Kernel) -> list[int]:
        """Bytes of each value a kernel writes."""
        if kernel.program is None:
            return [self.size(w) for w in kernel.writes]
        m, tile = rows_of(kernel, self.tokens), self.tile(kernel)
        return [
            math.prod(r.shape(m, kernel.cols, tile))
            * max(1, len(r.components))
            * r.storage(self.operand, self.compute).itemsize
            for r in results(kernel.program, raw=kernel.kind != FINALIZE)
        ]

    def tile(self, kernel: Kernel) -> Tile:
        """The tile of a kernel with a program, as far as it decides the size of results."""
        assert kernel.program is not None
        partial = any(w < 0 for w in kernel.writes)
        if self.tiling is None or kernel.kind != GEMM or not partial:
            return default_tile(kernel.program)
        layout = self.plan.nodes[kernel.root].attr("layout")
        (a,), (b,) = (self.tensors(r) for r in kernel.reads[:2])
        a, b = a.mT if layout == "tn" else a, b.mT if layout == "nt" else b
        return self.tiling(
            kernel.program, a, b, [x for r in kernel.reads[2:] for x in self.tensors(r)]
        )

    def tensors(self, r: int) -> list[Tensor]:
        """What a GEMM kernel is given for a value, without memory."""
        type_ = self.plan.nodes[r].type

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        if type_.kind is Kind.ROTARY:
            table = empty(self.positions, self.rotary_dim(r), dtype=self.compute)
            return [table, empty(self.tokens, dtype=torch.int64)]
        dtype = torch.int64 if type_.kind is Kind.INDEX else self.dtype(r)
        rows = self.rows(type_) if type_.has_rows else 1
        return [empty(rows, int(type_.cols) if type_.has_cols else 1, dtype=dtype)]

    def size(self, r: int) -> int:
        """Bytes of a reference."""
        if r < 0:
            return self.partials[r]
        node = self.plan.nodes[r]
        if node.type.kind is Kind.ROTARY:
            table = self.positions * self.rotary_dim(r) * self.compute.itemsize
            return table + self.tokens * torch.int64.itemsize
        return self.elements(node.type) * self.dtype(r).itemsize

    def dtype(self, r: int) -> torch.dtype:
        """Storage dtype of a value: vectors are wide unless they came in as parameters."""
        node = self.plan.nodes[r]
        if node.type.kind is Kind.TILE:
            named = self.plan.storage(r)
            if named == "accumulator":
                return self.compute
            return self.operand if named == "operand" else NAMED_DTYPES[named]
        if node.op == "operand":
            return self.operand if self.plan.parameter_only[r] else self.compute
        return self.dtype(node.args[0]) if self.kinds.get(r) in (VIEW, MOVE) else self.compute

    def rotary_dim(self, r: int) -> int:
        rotations = (n for n in self.plan.nodes if n.op == "rotate" and n.args[1] == r)
        return int(next(rotations).attr("rotary_dim"))

    def rows(self, type_: Type) -> int:
        return self.tokens if type_.rows == "M" else int(type_.rows)

    def elements(self, type_: Type) -> int:
        cols = int(type_.cols) if type_.has_cols else 1
        return (self.rows(type_) if type_.has_rows else 1) * cols
