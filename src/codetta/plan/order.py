"""The order of a Plan's kernels: one that dependencies allow and that needs little memory.

Of the kernels that could run next, the one after which the fewest bytes are alive does, and of
those that leave the same the one that stands first in the Plan. Views follow what they show at
once. Weight preparation never runs for its own sake: it goes directly before its first reader,
and a kernel that has to wait for one counts its bytes. So a prepared weight does not lie about, and
a schedule starts with a product that needs none where there is one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from codetta.plan.grouping import PREPARE, VIEW
from codetta.plan.kernels import Kernel
from codetta.plan.memory import Memory
from codetta.plan.plan import Plan
from codetta.plan.sizes import Sizes

#: M for which bytes are compared. The order must not depend on M: it belongs to the Plan.
TOKENS = 16384


def ordered(plan: Plan, kernels: list[Kernel], private: Collection[str] = ()) -> list[Kernel]:
    """The kernels in the order in which they run."""
    return [kernels[i] for i in _Ordering(plan, kernels, private).positions()]


class _Ordering:
    def __init__(self, plan: Plan, kernels: list[Kernel], private: Collection[str]) -> None:
        self.kernels = kernels
        self.memory = Memory(plan, kernels, private, Sizes(plan, kernels, TOKENS, torch.bfloat16))
        writer = {w: i for i, k in enumerate(kernels) for w in k.writes}
        self.needs = [{writer[r] for r in k.reads if r in writer} for k in kernels]
        # Preparation and views of parameters, which nothing but parameters can delay.
        self.lazy: set[int] = set()
        for i in sorted(range(len(kernels)), key=lambda i: kernels[i].root):
            if kernels[i].kind in (PREPARE, VIEW) and self.needs[i] <= self.lazy:
                self.lazy.add(i)
        self.done: set[int] = set()

    def positions(self) -> Iterator[int]:
        while len(self.done) < len(self.kernels):
            chosen = min(self._ready(), key=self._rank)
            for i in (*self._pulled(chosen), chosen):
                self.memory.run(i)
                self.done.add(i)
                yield i

    def _ready(self) -> list[int]:
        waiting = [i for i in range(len(self.kernels)) if i not in self.done]
        ready = [i for i in waiting if self.needs[i] <= self.done | self.lazy]
        return [i for i in ready if i not in self.lazy] or ready

    def _rank(self, i: int) -> tuple[bool, int, int]:
        _, after = self.memory.change(i, self._pulled(i))
        return self.kernels[i].kind != VIEW, after, self.kernels[i].root

    def _pulled(self, i: int) -> list[int]:
        """What is prepared for kernel i and has not been yet, in order."""
        found: set[int] = set()
        stack = [i]
        while stack:
            for j in self.needs[stack.pop()]:
                if j in self.lazy and j not in self.done and j not in found:
                    found.add(j)
                    stack.append(j)
        return sorted(found, key=lambda j: self.kernels[j].root)
