"""Scheduling: the kernels of a Plan, in the order in which they run.

    which epilogue computes what      placement.py
    what is left over, and grouping   grouping.py
    the Program of each kernel        kernels.py
    in which order they run           order.py, by what memory.py counts

:func:`schedule` returns a :class:`Schedule`, which :mod:`codetta.plan.runtime` executes and
:mod:`codetta.plan.cost` counts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from codetta.errors import CodettaError
from codetta.plan.grouping import GEMM, Group, groups
from codetta.plan.kernels import Kernel, emit
from codetta.plan.order import ordered
from codetta.plan.placement import Placement
from codetta.plan.plan import Plan

if TYPE_CHECKING:
    from codetta.plan.executable import Executable


@dataclass(frozen=True)
class Schedule:
    """Kernels of a Plan in execution order.

    Attributes:
        private: names of inputs that nobody reads after this schedule, such as what a forward saved
            for it alone. Their memory may be let go of early, or written to; see
            :meth:`codetta.plan.executable.Executable.run`.
    """

    plan: Plan
    kernels: tuple[Kernel, ...]
    private: frozenset[str] = frozenset()

    @cached_property
    def last_use(self) -> dict[int, int]:
        """Position of the last kernel that reads each value; outputs live on."""
        last = {r: i for i, k in enumerate(self.kernels) for r in k.reads}
        return last | {o.node: len(self.kernels) for o in self.plan.outputs}

    @cached_property
    def executable(self) -> Executable:
        """The schedule as a list of bound steps."""
        from codetta.plan.executable import Executable

        return Executable(self)

    def __str__(self) -> str:
        from codetta.plan.listing import format_schedule

        return format_schedule(self)


def schedule(plan: Plan, private: Collection[str] = ()) -> Schedule:
    """Assign every operation of ``plan`` to a kernel, and order the kernels.

    ``private``: names of inputs that nobody reads afterwards, see :class:`Schedule`.
    """
    owned = frozenset(private)
    refused: set[tuple[int, int]] = set()
    while True:
        placement = Placement(plan, refused)
        kernels = []
        misfits: set[tuple[int, int]] = set()
        for group in groups(placement):
            try:
                kernels.append(emit(placement, group))
            except CodettaError:
                misfits |= _misfit(placement, group)
        if not misfits:
            return Schedule(plan, tuple(ordered(plan, kernels, owned)), owned)
        refused |= misfits


def _misfit(placement: Placement, group: Group) -> set[tuple[int, int]]:
    """The member that has no Program together with the others: its pair layout is another one.

    Returned as pairs (member, what it must not be with), for the next attempt.
    """
    for count, i in enumerate(group.members, 1):
        try:
            emit(placement, Group(group.kind, group.root, group.members[:count]))
        except CodettaError:
            others = (group.root,) if group.kind == GEMM else group.members[: count - 1]
            found = {(i, other) for other in others if other != i}
            if not found:
                raise  # alone, and still impossible
            return found
    raise AssertionError("a group is no larger than its members")
