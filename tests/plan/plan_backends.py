"""A backend for tests of the runtime: the reference, in memory whose life can be watched."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from codetta.backends.calls import ReferenceBackend
from codetta.backends.select import Bound


class Block(np.ndarray[Any, Any]):
    """Memory that says when it is freed."""


class Watching(ReferenceBackend):
    """The reference backend, on memory of its own.

    Attributes:
        live, peak: bytes in use, now and at most.
        calls: kernels launched.
        accepts: whether it writes results into memory that it is offered.
        taken: shapes of the results for which it did.
    """

    name = "watching"

    def __init__(self, *, accepts: bool = True) -> None:
        self.accepts = accepts
        self.live = self.peak = self.calls = 0
        self.taken: list[tuple[int, ...]] = []

    def own(self, x: Tensor) -> Tensor:
        """x in watched memory."""
        block = np.empty(x.nbytes, dtype=np.uint8).view(Block)
        self.live += x.nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(block, self._freed, x.nbytes)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return torch.from_numpy(block).view(x.dtype).view(x.shape).copy_(x.detach())

    def _freed(self, size: int) -> None:
        self.live -= size

    def _placed(self, made: Sequence[Tensor], into: Mapping[int, Tensor] | None) -> list[Tensor]:
        self.calls += 1
        offers = into if into and self.accepts else {}
        self.taken += [tuple(x.shape) for x in offers.values()]
        for i, x in offers.items():
            assert (x.shape, x.dtype) == (made[i].shape, made[i].dtype) and x.is_contiguous()
        return [offers[i].copy_(x) if i in offers else self.own(x) for i, x in enumerate(made)]

    def gemm(self, *arguments: Any, into: Mapping[int, Tensor] | None = None) -> list[Tensor]:
        return self._placed(super().gemm(*arguments), into)

    def pointwise(self, *arguments: Any, into: Mapping[int, Tensor] | None = None) -> list[Tensor]:
        return self._placed(super().pointwise(*arguments), into)

    def prepare(self, *arguments: Any) -> Tensor:
        return self._placed([super().prepare(*arguments)], None)[0]


class Binding(Watching):
    """The same as a backend that binds: what it binds runs on watched memory, too.

    Attributes:
        bound: how often something was bound.
        state: what decides besides the arrays.
        free: something may be bound.
    """

    binds = True

    def __init__(self) -> None:
        super().__init__()
        self.bound, self.state, self.free = 0, 0, True

    def setting(self) -> tuple[Any, ...]:
        return self, self.state

    def can_bind(self) -> bool:
        return self.free

    def gemm_bound(
        self, program: Any, a: Any, b: Any, operands: Any, tile: Any, raw: bool, into: Any
    ) -> Bound:
        at = {k: next(i for i, y in enumerate(operands) if y is x) for k, x in (into or {}).items()}

        def run(a: Tensor, b: Tensor, t: Sequence[Tensor]) -> list[Tensor]:
            return self.gemm(program, a, b, t, tile, raw, into={k: t[i] for k, i in at.items()})

        return self._counted(run)

    def pointwise_bound(self, program: Any, operands: Any, *rest: Any) -> Bound:
        return self._counted(lambda t: self.pointwise(program, t, *rest))

    def prepare_bound(self, plan: Any, weights: Any) -> Bound:
        return self._counted(lambda w: self.prepare(plan, w))

    def _counted(self, run: Callable[..., Any]) -> Bound:
        self.bound += 1
        return Bound(run)
