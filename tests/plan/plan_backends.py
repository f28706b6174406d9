"""A backend for tests of the runtime: the reference, in memory whose life can be watched."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from codetta.backends.calls import ReferenceBackend


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
