"""The cost table: kernels, bytes and operations of a Schedule, from its types alone.

A kernel reads each of its operands once and writes each output once; that is what the mainloop and
a single-pass epilogue do up to cache effects, and what a dispatch trace sees. Matrices are in the
operand dtype, vectors made by finalizers and partials in the accumulator's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch

from codetta.backends.layout import default_tile, results
from codetta.language.primitives import COST
from codetta.language.program import Program
from codetta.language.types import Kind, Type
from codetta.plan.grouping import FINALIZE, GEMM, MOVE, OPAQUE_KIND, VIEW
from codetta.plan.kernels import Kernel
from codetta.plan.runtime import rows_of
from codetta.plan.schedule import Schedule


@dataclass(frozen=True)
class Cost:
    """One row of the table.

    Attributes:
        name: the Plan's name and the kernel's root node.
        kind: 'gemm', 'attention' or 'memory' (everything bound by memory traffic).
        role: what the kernel is: 'gemm', 'pointwise', 'finalize', 'prepare', 'move', 'opaque'.
        bytes_read, bytes_written: traffic in bytes.
        flops: multiply-adds of the contraction counted as two, plus the epilogue's arithmetic.
        special: transcendental operations.
        count: how many launches (1).
    """

    name: str
    kind: str
    role: str
    bytes_read: int
    bytes_written: int
    flops: int
    special: int
    count: int = 1

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


def cost_table(
    schedule: Schedule,
    *,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    vector_dtype: torch.dtype | None = None,
    positions: int | None = None,
) -> list[Cost]:
    """Costs of every kernel at M = ``tokens`` in ``dtype``.

    ``positions`` is the number of rows of the rotary tables (default: as many as tokens).
    """
    counter = _Counter(schedule, tokens, dtype, vector_dtype, positions or tokens)
    return [counter.row(k) for k in schedule.kernels if k.kind != VIEW]


def totals(rows: Iterable[Cost]) -> dict[str, dict[str, int]]:
    """Kernels and bytes by kind."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        entry = found.setdefault(row.kind, {"kernels": 0, "bytes": 0})
        entry["kernels"] += row.count
        entry["bytes"] += row.bytes * row.count
    return found


class _Counter:
    def __init__(
        self,
        schedule: Schedule,
        tokens: int,
        dtype: torch.dtype,
        vector_dtype: torch.dtype | None,
        positions: int,
    ) -> None:
        self.plan, self.tokens, self.positions = schedule.plan, tokens, positions
        self.operand = dtype
        self.compute = vector_dtype or torch.promote_types(torch.float32, dtype)
        self.kinds = {k.root: k.kind for k in schedule.kernels}
        #: bytes of the raw partials of each reduction
        self.partials = {
            w: size
            for k in schedule.kernels
            if k.program is not None
            for w, size in zip(k.writes, self.written(k), strict=True)
            if w < 0
        }

    def row(self, kernel: Kernel) -> Cost:
        # A GEMM's epilogue loads tiles of a or b again, should it need them.
        gemm = 2 if kernel.kind == GEMM else 0
        reads = [*kernel.reads[:gemm], *dict.fromkeys(kernel.reads[gemm:])]
        flops, special = self.work(kernel)
        return Cost(
            name=f"{self.plan.name}.v{kernel.root}",
            kind={GEMM: "gemm", OPAQUE_KIND: "attention"}.get(kernel.kind, "memory"),
            role=kernel.kind,
            bytes_read=sum(self.size(r) for r in reads),
            bytes_written=sum(self.written(kernel)),
            flops=flops,
            special=special,
        )

    # ---- bytes
    def written(self, kernel: Kernel) -> list[int]:
        """Bytes of each value a kernel writes."""
        if kernel.program is None:
            return [self.size(w) for w in kernel.writes]
        m, tile = rows_of(kernel, self.tokens), default_tile(kernel.program)
        return [
            math.prod(r.shape(m, kernel.cols, tile))
            * max(1, len(r.components))
            * r.storage(self.operand, self.compute).itemsize
            for r in results(kernel.program, raw=kernel.kind != FINALIZE)
        ]

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
            return self.operand
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

    # ---- arithmetic
    def work(self, kernel: Kernel) -> tuple[int, int]:
        flops = special = 0
        if kernel.kind == GEMM:
            node = self.plan.nodes[kernel.root]
            a = self.plan.nodes[kernel.reads[0]].type
            inner = self.rows(a) if node.attr("layout") == "tn" else int(a.cols)
            flops = 2 * self.elements(node.type) * inner
        if kernel.program is not None and kernel.kind != FINALIZE:
            f, s = program_work(kernel.program)
            elements = kernel.cols * rows_of(kernel, self.tokens)
            flops, special = flops + int(f * elements), special + int(s * elements)
        return flops, special


def program_work(program: Program) -> tuple[Fraction, Fraction]:
    """Operations per accumulator element: (flops, special)."""
    flops = special = Fraction(0)
    for node in program.nodes:
        if not node.args:
            continue
        types = [node.type, *(program.nodes[a].type for a in node.args)]
        widths = [t.cols for t in types if t.kind is Kind.TILE]
        if widths:
            flops += COST[node.op].flops * max(widths)
            special += COST[node.op].special * max(widths)
    return flops, special
