"""Slots: the places of a Schedule's values in one list of tensors.

A value has as many slots as it has arrays: a rotary input two, raw partials one per component,
everything else one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from codetta.language.primitives import REDUCTION
from codetta.language.types import Kind
from codetta.plan.kernels import Kernel
from codetta.plan.memory import donations, own_values

if TYPE_CHECKING:
    from codetta.plan.schedule import Schedule


class Slots:
    """Slots of all references, and of each kernel what dies after it and what it may overwrite."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.plan = schedule, schedule.plan
        self.at: dict[int, tuple[int, ...]] = {}
        self.size = 0
        for i, node in enumerate(self.plan.nodes):
            if node.op == "operand":
                self._take(i, 2 if node.type.kind is Kind.ROTARY else 1)
        for kernel in schedule.kernels:
            for w in kernel.writes:
                self._take(w, len(REDUCTION[self.plan.nodes[~w].op].components) if w < 0 else 1)
        last = schedule.last_use
        self.dead = {
            id(k): tuple(
                slot
                for r in dict.fromkeys((*k.reads, *k.writes))
                if last.get(r, position) == position
                for slot in self.at[r]
            )
            for position, k in enumerate(schedule.kernels)
        }
        self.position = {id(k): position for position, k in enumerate(schedule.kernels)}
        self.own = own_values(self.plan, schedule.kernels, schedule.private)

    def _take(self, r: int, count: int) -> None:
        self.at[r] = tuple(range(self.size, self.size + count))
        self.size += count

    def operands(self, reads: Sequence[int]) -> tuple[int, ...]:
        """Slots of a program's operands; partials and rotary tables are several tensors each.

        The components of a reduction are consecutive operands, and named once here.
        """
        found: list[int] = []
        seen: set[int] = set()
        for r in reads:
            if len(self.at[r]) == 1:
                found += self.at[r]
            elif r not in seen:
                found += self.at[r]
                seen.add(r)
        return tuple(found)

    def donated(self, kernel: Kernel) -> tuple[tuple[int, int, bool], ...]:
        """(position of the result, slot, the value is an input)."""
        last, position = self.schedule.last_use, self.position[id(kernel)]
        found = donations(
            self.plan, kernel, lambda r: r in self.own and last.get(r, position) == position
        )
        nodes = self.plan.nodes
        return tuple((p, self.at[r][0], nodes[r].op == "operand") for p, r in found.items())
