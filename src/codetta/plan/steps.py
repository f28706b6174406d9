"""The steps of an executable: one per kernel, bound to slots, see executable.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from codetta.backends.select import Backend, Binding, Bound
from codetta.language.meaning import Context
from codetta.language.types import Kind
from codetta.language.values import attrs_of
from codetta.plan.bound import Writer
from codetta.plan.grouping import FINALIZE, GEMM, POINTWISE, PREPARE
from codetta.plan.kernels import Kernel
from codetta.plan.launch import OPERATORS
from codetta.plan.operations import OPERATIONS
from codetta.plan.sides import Sides, in_order, packed_sides
from codetta.plan.slots import Slots

#: The two dimensions in which kernels read a result that backends return with fewer.
CANONICAL: dict[Kind, tuple[int, int]] = {
    Kind.COL: (-1, 1),
    Kind.INDEX: (-1, 1),
    Kind.ROW: (1, -1),
    Kind.SCALAR: (1, 1),
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


Into = tuple[tuple[int, int, bool], ...]
Packs = tuple[Sides, tuple[int, ...]] | None


class Step(Protocol):
    """One kernel.

    Attributes:
        into: (position of a result, slot, the slot is an input): what it may be written to.
        dead: slots that nobody reads after it.
        packs: weights that may lie side by side, and their slots.
    """

    into: Into
    dead: tuple[int, ...]
    packs: Packs

    def run(self, values: list[Any], run: Run) -> None: ...

    def bind(self, values: list[Any], run: Run, backend: Binding, to: Writer) -> None:
        """Write what :meth:`run` has done, for values like these."""


class _Gemm:
    """a @ b with its program."""

    packs: Packs = None

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

    def bind(self, values: list[Any], run: Run, backend: Binding, to: Writer) -> None:
        a, b = values[self.a], values[self.b]
        a, b = a.mT if self.turn_a else a, b.mT if self.turn_b else b
        operands = [values[i] for i in self.operands]
        into = _places(self.into, values, run)
        bound = backend.gemm_bound(self.program, a, b, operands, None, True, into)
        sides = ((self.a, self.turn_a), (self.b, self.turn_b))
        texts = [to.read(slot) + (".mT" if turn else "") for slot, turn in sides]
        to.unpack([(slot, None) for slot in self.writes], to.call(bound, self.operands, *texts))


class _Tiles:
    """A pointwise program (raw), or a finalizer."""

    packs: Packs = None

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
            values[slot] = x if canonical is None else x.reshape(canonical)

    def bind(self, values: list[Any], run: Run, backend: Binding, to: Writer) -> None:
        # No offers: kernels of several passes must not take them.
        bound = backend.pointwise_bound(
            self.program, [values[i] for i in self.operands], run.m if self.m is None else self.m,
            self.n, run.operand, run.compute, None, self.raw,
        )  # fmt: skip
        to.unpack(self.writes, to.call(bound, self.operands))


class _Prepare:
    """Weights made ready; those that lie side by side already are read where they lie."""

    into: Into = ()

    def __init__(self, slots: Slots, kernel: Kernel) -> None:
        assert kernel.plan is not None
        self.plan, self.dead = kernel.plan, slots.dead[id(kernel)]
        self.reads = tuple(slots.at[r][0] for r in kernel.reads)
        (self.write,) = slots.at[kernel.root]
        sides = packed_sides(slots.schedule, kernel)
        self.packs: Packs = None
        if sides is not None:
            order = in_order(sides, kernel.plan)
            self.packs = sides, tuple(self.reads[k] for k in order)

    def run(self, values: list[Any], run: Run) -> None:
        there = self._there(values)
        if there is None:
            there = run.backend.prepare(self.plan, [values[i] for i in self.reads])
        values[self.write] = there

    def bind(self, values: list[Any], run: Run, backend: Binding, to: Writer) -> None:
        if self.packs is not None and self._there(values) is not None:  # so the key says
            sides, members = self.packs
            text = to.call(Bound(sides.whole), members)
        else:
            bound = backend.prepare_bound(self.plan, [values[i] for i in self.reads])
            text = to.call(bound, self.reads)
        to.write(self.write, text)

    def _there(self, values: list[Any]) -> Tensor | None:
        """The result where it lies."""
        if self.packs is None:
            return None
        sides, members = self.packs
        return sides.whole([values[i] for i in members])


class _Torch:
    """A view, a move or an opaque function: its meaning, in PyTorch."""

    into: Into = ()
    packs: Packs = None

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

    def bind(self, values: list[Any], run: Run, backend: Binding, to: Writer) -> None:
        ctx = Context(run.m, 1, run.operand, run.compute, run.device)
        fixed = map(to.constant, (self.meaning, ctx, self.attrs))
        meaning, *given = (*fixed, *map(to.read, self.reads))
        to.write(self.write, f"{meaning}({', '.join(given)})")


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
def _places(into: Into, values: list[Any], run: Run) -> dict[int, Tensor]:
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
