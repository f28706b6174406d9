"""Memory of a Schedule: when values die, which outputs take a dying value's place, the peak.

A value lives from the kernel that writes it to the last one that reads it or a view of it; outputs
live on. Inputs belong to the caller and are not counted, but for the *private* ones: what a forward
saved for this backward alone. They die as the schedule's own values do.

An output may be written in place of a value that dies in the very kernel, if the value has its size
and an epilogue (not the mainloop) reads it: of SwiGLU's backward, dz over the saved z.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch

from codetta.language.primitives import REDUCTION
from codetta.language.types import Kind
from codetta.language.values import Node
from codetta.plan.grouping import GEMM, POINTWISE, VIEW
from codetta.plan.kernels import Kernel
from codetta.plan.plan import Plan
from codetta.plan.sizes import Sizes

if TYPE_CHECKING:
    from codetta.plan.schedule import Schedule

_CALLER = -1  # reads the outputs, and never ends
_TILES = (GEMM, POINTWISE)


def peak_bytes(
    schedule: Schedule,
    *,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    vector_dtype: torch.dtype | None = None,
    donate: bool = True,
) -> int:
    """The most bytes alive at once, of private inputs and of everything the kernels write.

    Args:
        schedule: inputs that are not private are the caller's and not counted.
        tokens: M.
        dtype: of matrices.
        vector_dtype: of what finalizers write; by default fp32 or wider.
        donate: outputs are written in place of dying values where that is possible.
    """
    plan, kernels = schedule.plan, schedule.kernels
    sizes = Sizes(plan, kernels, tokens, dtype, vector_dtype)
    memory = Memory(plan, kernels, schedule.private, sizes, donate=donate)
    return max([memory.live, *(memory.run(i) for i in range(len(kernels)))])


class Memory:
    """What is alive while kernels run, in any order that their dependencies allow.

    Attributes:
        live: bytes alive now.
    """

    def __init__(
        self,
        plan: Plan,
        kernels: Sequence[Kernel],
        private: Collection[str],
        sizes: Sizes,
        *,
        donate: bool = True,
    ) -> None:
        self.plan, self.kernels, self.donate = plan, kernels, donate
        self.root = roots(kernels)
        self.written = [sizes.written(k) for k in kernels]
        self.bytes = {
            w: size
            for k, written in zip(kernels, self.written, strict=True)
            if k.kind != VIEW
            for w, size in zip(k.writes, written, strict=True)
        }
        owned = {i for i, n in enumerate(plan.nodes) if _is_private(n, private)}
        self.bytes |= {i: sizes.size(i) for i in owned}
        self.readers: dict[int, set[int]] = {r: set() for r in self.bytes}
        for i, kernel in enumerate(kernels):
            for r in kernel.reads:
                self.readers.setdefault(self._root(r), set()).add(i)
        for out in plan.outputs:
            self.readers.setdefault(self._root(out.node), set()).add(_CALLER)
        self.own = own_values(plan, kernels, private)
        self.live = sum(self.bytes[i] for i in owned)

    def _root(self, r: int) -> int:
        return self.root.get(r, r)

    def change(self, i: int, before: Collection[int] = ()) -> tuple[int, int]:
        """(bytes alive while kernel i runs, bytes alive after it), more than now.

        ``before``: kernels that run just before it, which write what it reads.
        """
        running = {i, *before}
        made = sum(sum(self.written[j]) for j in running if self.kernels[j].kind != VIEW)
        reads = {self._root(r) for j in running for r in self.kernels[j].reads}
        dead = {r for r in reads if r in self.bytes and self.readers[r] <= running}
        taken = sum(self.bytes[r] for r in self.donated(i, running).values())
        freed = sum(self.bytes[r] for r in dead)
        return made - taken, made - freed

    def donated(self, i: int, running: Collection[int] = ()) -> dict[int, int]:
        """Donations of kernel i if it ran now."""
        if not self.donate:
            return {}
        after = {i, *running}
        return donations(
            self.plan, self.kernels[i], lambda r: r in self.own and self.readers[r] <= after
        )

    def run(self, i: int) -> int:
        """Run kernel i; returns the bytes alive meanwhile."""
        during, after = self.change(i)
        peak = self.live + during
        self.live += after
        for r in self.kernels[i].reads:
            self.readers[self._root(r)].discard(i)
        return peak


def roots(kernels: Sequence[Kernel]) -> dict[int, int]:
    """For each view, the value whose memory it shows."""
    found: dict[int, int] = {}
    for kernel in kernels:
        if kernel.kind == VIEW:
            source = kernel.reads[0]
            found |= dict.fromkeys(kernel.writes, found.get(source, source))
    return found


def own_values(plan: Plan, kernels: Sequence[Kernel], private: Collection[str]) -> set[int]:
    """Matrices that belong to the schedule and that nothing but its kernels can see.

    A value that a view, a move or an opaque function reads may live on in what these return.
    """
    found = {w for k in kernels if k.kind in _TILES for w in k.writes if w >= 0}
    found |= {i for i, n in enumerate(plan.nodes) if _is_private(n, private)}
    shown = {r for k in kernels if k.program is None and k.plan is None for r in k.reads}
    outputs = {o.node for o in plan.outputs}
    return {i for i in found - shown - outputs if plan.nodes[i].type.kind is Kind.TILE}


def donations(plan: Plan, kernel: Kernel, dying: Callable[[int], bool]) -> dict[int, int]:
    """{position among the kernel's flat results: the dying value whose memory it may take}."""
    if kernel.kind not in _TILES:
        return {}
    mainloop = 2 if kernel.kind == GEMM else 0
    streamed, loaded = kernel.reads[:mainloop], kernel.reads[mainloop:]
    free = [r for r in loaded if loaded.count(r) == 1 and r not in streamed and dying(r)]
    found: dict[int, int] = {}
    position = 0
    for w in kernel.writes:
        if w < 0:
            position += len(REDUCTION[plan.nodes[~w].op].components)
            continue
        place = next((r for r in free if _alike(plan, r, w)), None)
        if place is not None:
            free.remove(place)
            found[position] = place
        position += 1
    return found


def _alike(plan: Plan, r: int, w: int) -> bool:
    a, b = plan.nodes[r].type, plan.nodes[w].type
    alike = (a.kind, a.rows, a.cols) == (b.kind, b.rows, b.cols)
    return alike and plan.storage(r) == plan.storage(w)


def _is_private(node: Node, private: Collection[str]) -> bool:
    return node.op == "operand" and node.attr("name") in private
