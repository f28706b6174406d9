"""The steps of an executable: one per kernel, bound to slots, see executable.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from codetta.backends.select import Backend
from codetta.language.meaning import Context
from codetta.language.types import Kind
from codetta.language.values import attrs_of
from codetta.plan.grouping import FINALIZE, GEMM, POINTWISE, PREPARE
from codetta.plan.kernels import Kernel
from codetta.plan.launch import OPERATORS
from codetta.plan.operations import OPERATIONS
from codetta.plan.sides import in_order, packed_sides
from codetta.plan.slots import Slots

#: From a result as backends return it to the two dimensions in which kernels read it.
CANONICAL: dict[Kind, Callable[[Tensor], Tensor]] = {
    Kind.COL: lambda x: x.reshape(-1, 1),
    Kind.INDEX: lambda x: x.reshape(-1, 1),
    Kind.ROW: lambda x: x.reshape(1, -1),
    Kind.SCALAR: lambda x: x.reshape(1, 1),
}


class Run:
    """What a run adds to its steps."""

    __slots__ = ("backend", "compute", "device", "donate", "m", "operand")

    def __init__(
        self,
        backend: Backend,
        m: int,
        operand: torch.dtype,
        device: torch.device,
        donate: bool,
    ) -> None:
        self.backend, self.m, self.operand, self.device = backend, m, operand, device
        self.compute = torch.float64 if operand is torch.float64 else torch.float32
        self.donate = donate


class Step(Protocol):
    dead: tuple[int, ...]

    def run(self, values: list[Any], run: Run) -> None: ...


class _Gemm:
    """a @ b with its program; slots ``into`` may be written to, by position of the result."""

    def __init__(self, slots: Slots, kernel: Kernel) -> None:
        assert kernel.program is not None
        layout = slots.plan.nodes[kernel.root].attr("layout")
        self.program = kernel.program
        (self.a,), (self.b,) = (slots.at[r] for r in kernel.reads[:2])
        self.turn_a, self.turn_b = layout == "tn", layout == "nt"
        self.operands = slots.operands(kernel.reads[2:])
        self.writes = tuple(s for w in kernel.writes for s in slots.at[w])
        self.into, self.dead = slots.donated(kernel), slots.dead[id(kernel)]

    def run(self, values: list[Any], run: Run) -> None:
        a, b = values[self.a], values[self.b]
        a, b = a.mT if self.turn_a else a, b.mT if self.turn_b else b
        into = _places(self.into, values, run) if self.into else {}
        operands = [values[i] for i in self.operands]
        if into:
            made = run.backend.gemm(self.program, a, b, operands, None, True, into=into)
        else:
            made = run.backend.gemm(self.program, a, b, operands, None, True)
        for slot, x in zip(self.writes, made, strict=True):
            values[slot] = x


class _Tiles:
    """A pointwise program (raw), or a finalizer."""

    def __init__(self, slots: Slots, kernel: Kernel) -> None:
        assert kernel.program is not None
        self.program, self.n = kernel.program, kernel.cols
        self.m = None if kernel.rows == "M" else int(kernel.rows)
        self.raw = kernel.kind == POINTWISE
        self.operands = slots.operands(kernel.reads)
        nodes = slots.plan.nodes
        self.writes = tuple(
            (s, CANONICAL.get(nodes[w].type.kind) if w >= 0 else None)
            for w in kernel.writes
            for s in slots.at[w]
        )
        self.into, self.dead = slots.donated(kernel), slots.dead[id(kernel)]

    def run(self, values: list[Any], run: Run) -> None:
        m = run.m if self.m is None else self.m
        into = _places(self.into, values, run) if self.into else {}
        operands = [values[i] for i in self.operands]
        options = {"into": into} if into else {}
        made = run.backend.pointwise(
            self.program, operands, m, self.n, run.operand, run.compute, None, self.raw, **options
        )
        for (slot, canonical), x in zip(self.writes, made, strict=True):
            values[slot] = x if canonical is None else canonical(x)


class _Prepare:
    """Weights made ready; those that lie side by side already are read where they lie."""

    def __init__(self, slots: Slots, kernel: Kernel) -> None:
        assert kernel.plan is not None
        self.plan, self.dead = kernel.plan, slots.dead[id(kernel)]
        self.reads = tuple(slots.at[r][0] for r in kernel.reads)
        (self.write,) = slots.at[kernel.root]
        self.sides = packed_sides(slots.schedule, kernel)
        self.order = () if self.sides is None else in_order(self.sides, kernel.plan)

    def run(self, values: list[Any], run: Run) -> None:
        weights = [values[i] for i in self.reads]
        there = None if self.sides is None else self.sides.whole([weights[k] for k in self.order])
        values[self.write] = run.backend.prepare(self.plan, weights) if there is None else there


class _Torch:
    """A view, a move or an opaque function: its meaning, in PyTorch."""

    def __init__(self, slots: Slots, kernel: Kernel) -> None:
        node = slots.plan.nodes[kernel.root]
        self.meaning, self.attrs = OPERATIONS[node.op].meaning, attrs_of(node)
        self.reads = tuple(slots.at[r][0] for r in kernel.reads)
        (self.write,) = slots.at[kernel.root]
        self.dead = slots.dead[id(kernel)]

    def run(self, values: list[Any], run: Run) -> None:
        ctx = Context(run.m, 1, run.operand, run.compute, run.device)
        args = [values[i] for i in self.reads]
        values[self.write] = self.meaning(ctx, self.attrs, *args)


_STEPS: dict[str, Callable[[Slots, Kernel], Step]] = {
    GEMM: _Gemm,
    POINTWISE: _Tiles,
    FINALIZE: _Tiles,
    PREPARE: _Prepare,
}


def step(slots: Slots, kernel: Kernel) -> Step:
    """The step of a kernel."""
    made: Callable[[Slots, Kernel], Step] = _STEPS.get(kernel.kind, _Torch)
    return made(slots, kernel)


# ---------------------------------------------------------------------------------- donation
def _places(
    into: tuple[tuple[int, int, bool], ...], values: list[Any], run: Run
) -> dict[int, Tensor]:
    """Tensors that a kernel may write its results to, by position of the result."""
    if run.backend is OPERATORS:
        return {}
    return {
        position: values[slot]
        for position, slot, given in into
        if not given or (run.donate and _is_alone(values, slot))
    }


def _references(values: list[Any], slot: int) -> int:
    x = values[slot]
    return sys.getrefcount(x)


_ALONE = _references([object()], 0)


def _is_alone(values: list[Any], slot: int) -> bool:
    """Nothing refers to the tensor or to its memory but this list.

    A hook on saved tensors may have kept what it was given, and a view shares the memory.
    """
    if _references(values, slot) > _ALONE:
        return False
    x = values[slot]
    storage = x.untyped_storage()
    # The storage object itself is the second reference to the memory.
    return x._use_count() == 1 and torch._C._storage_Use_Count(storage._cdata) == 2
