"""Weights that already lie side by side, so that packing them is a view of their memory.

A packing stacks and interleaves rows: row i of a weight becomes row ``first + step * i`` of one
matrix. Where the weights are views of one storage that lie exactly so (``codetta.compile(...,
pack=True)`` lays them out), that matrix is in memory already, and the kernel that would make it has
nothing to do. Whether they lie so is read off the tensors at each run, from addresses and strides
alone: what moves a weight elsewhere (``.to()``, ``load_state_dict(assign=True)``) brings the kernel
back, and never a wrong result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from codetta.backends.watched import PLAIN
from codetta.language.types import Kind
from codetta.plan.grouping import PREPARE
from codetta.plan.kernels import Kernel
from codetta.plan.plan import Plan

if TYPE_CHECKING:
    from codetta.plan.schedule import Schedule

#: Operations that put rows of matrices into one matrix.
PACKS = frozenset({"stack_rows", "interleave_rows"})


class Side(NamedTuple):
    """A matrix whose row i is row ``first + step * i`` of another one."""

    name: str
    first: int
    step: int


@dataclass(frozen=True)
class Sides:
    """Matrices that make up one of ``rows`` x ``cols``.

    Attributes:
        members: in the order of their first rows.
    """

    members: tuple[Side, ...]
    rows: int
    cols: int

    def whole(self, weights: Sequence[Tensor]) -> Tensor | None:
        """The matrix that ``weights``, the members in order, are parts of; None if they are not.

        A view of their storage, without history. Reads no data and does not wait for a device.
        """
        if not have_memory():
            return None
        at = weights[0]
        cols, begin = self.cols, at.storage_offset() - self.members[0].first * self.cols
        storage = at.untyped_storage() if type(at) in PLAIN else None
        if storage is None or begin < 0:
            return None
        for member, w in zip(self.members, weights, strict=True):
            # Their sizes are the Plan's, so each row of the whole is one of theirs: in the storage.
            if (
                type(w) not in PLAIN
                or w.untyped_storage()._cdata != storage._cdata
                or w.dtype is not at.dtype
                or w.stride() != (member.step * cols, 1)
                or w.storage_offset() != begin + member.first * cols
            ):
                return None
        return at.detach().as_strided((self.rows, cols), (cols, 1), begin)


def have_memory() -> bool:
    """Tensors have memory to look at: they are not traced by Dynamo, nor batched by torch.func."""
    tracing = torch.compiler.is_dynamo_compiling()
    return not (tracing or torch._C._are_functorch_transforms_active())


def sides(plan: Plan, i: int) -> Sides | None:
    """How the matrices that node i puts side by side lie in it; None if it does more than that."""
    members: list[Side] = []
    waiting = [(i, 0, 1)]
    while waiting:
        at, first, step = waiting.pop()
        node = plan.nodes[at]
        if node.op == "operand" and node.type.kind is Kind.TILE:
            members.append(Side(str(node.attr("name")), first, step))
        elif node.op == "stack_rows":
            for a in node.args:
                waiting.append((a, first, step))
                first += step * int(plan.nodes[a].type.rows)
        elif node.op == "interleave_rows":
            waiting += [(a, first + k * step, 2 * step) for k, a in enumerate(node.args)]
        else:
            return None
    if len(members) < 2 or len({m.name for m in members}) < len(members):
        return None
    members.sort(key=lambda m: m.first)
    type_ = plan.nodes[i].type
    return Sides(tuple(members), int(type_.rows), int(type_.cols))


def in_order(found: Sides, plan: Plan) -> tuple[int, ...]:
    """Which input of ``plan`` each member is."""
    position = {i.name: k for k, i in enumerate(plan.inputs)}
    return tuple(position[m.name] for m in found.members)


def packed_sides(schedule: Schedule, kernel: Kernel) -> Sides | None:
    """What a preparation packs, if a view of its inputs may take the place of its result.

    That is where nothing but kernels reads the result: an output of the schedule, or a view of it,
    would share memory with an input. What a kernel packs and casts, as under autocast, is not it.
    """
    if kernel.kind != PREPARE or kernel.plan is None:
        return None
    shown = {r for k in schedule.kernels if k.program is None and k.plan is None for r in k.reads}
    shown |= {o.node for o in schedule.plan.outputs}
    return None if kernel.root in shown else sides(kernel.plan, kernel.plan.outputs[0].node)
