"""The cost table: kernels, bytes and operations of a Schedule, from its types alone.

A kernel reads each of its operands once and writes each output once; that is what the mainloop and
a single-pass epilogue do up to cache effects, and what a dispatch trace sees. Matrices are in the
operand dtype, vectors made by finalizers and partials in the accumulator's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch

from codetta.backends.layout import Tiling
from codetta.language.primitives import COST
from codetta.language.program import Program
from codetta.language.types import Kind
from codetta.plan.grouping import FINALIZE, GEMM, MOVE, OPAQUE_KIND, VIEW
from codetta.plan.kernels import Kernel
from codetta.plan.schedule import Schedule
from codetta.plan.sides import Sides, packed_sides
from codetta.plan.sizes import Sizes, rows_of


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
    tiling: Tiling | None = None,
    packed: Collection[Sides] = (),
) -> list[Cost]:
    """Costs of every kernel at M = ``tokens`` in ``dtype``.

    ``positions`` is the number of rows of the rotary tables (default: as many as tokens), and
    ``tiling`` that of the backend that runs the schedule, which decides the number of partials
    (:func:`codetta.backends.select.tiling_for`; default: the reference's). ``packed`` are inputs
    that lie side by side in memory already: packing them costs nothing.
    """
    plan, kernels = schedule.plan, schedule.kernels
    counter = _Counter(plan, kernels, tokens, dtype, vector_dtype, positions, tiling)
    return [counter.row(k) for k in launched(schedule, packed)]


def launched(schedule: Schedule, packed: Collection[Sides] = ()) -> list[Kernel]:
    """The kernels that run: no views, and no packing of inputs that lie so already."""
    return [
        k
        for k in schedule.kernels
        if k.kind != VIEW and not (packed and packed_sides(schedule, k) in packed)
    ]


def totals(rows: Iterable[Cost]) -> dict[str, dict[str, int]]:
    """Kernels and bytes by kind."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        entry = found.setdefault(row.kind, {"kernels": 0, "bytes": 0})
        entry["kernels"] += row.count
        entry["bytes"] += row.bytes * row.count
    return found


class _Counter(Sizes):
    def row(self, kernel: Kernel) -> Cost:
        # A GEMM's epilogue loads tiles of a or b again, should it need them.
        gemm = 2 if kernel.kind == GEMM else 0
        reads = [*kernel.reads[:gemm], *dict.fromkeys(kernel.reads[gemm:])]
        flops, special = self.work(kernel)
        return Cost(
            name=f"{self.plan.name}.v{kernel.root}",
            kind={GEMM: "gemm", OPAQUE_KIND: "attention"}.get(kernel.kind, "memory"),
            role=kernel.kind,
            bytes_read=sum(self.size(r) for r in reads) + self.index(kernel),
            bytes_written=sum(self.written(kernel)),
            flops=flops,
            special=special,
        )

    def index(self, kernel: Kernel) -> int:
        """Bytes of the row numbers that a move reads beside its operand, if it permutes rows."""
        node = self.plan.nodes[kernel.root]
        permutes = kernel.kind == MOVE and node.op in ("permute_rows", "permute_vector")
        return self.rows(node.type) * torch.int64.itemsize if permutes else 0

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
