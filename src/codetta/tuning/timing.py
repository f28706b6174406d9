"""Times of GPU work, candidates interleaved so that clocks and temperature are the same for all."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_CACHE_BYTES = 128 * 2**20  # more than the L2 of any Hopper


@dataclass
class Times:
    """Milliseconds of the repetitions of one candidate."""

    ms: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def best(self) -> float:
        return min(self.ms)


#: From candidates by name and a number of repetitions to their times.
Measure = Callable[[Mapping[str, Callable[[], Any]], int], dict[str, Times]]


class GpuTimer:
    """CUDA events around each launch, after a write that empties the L2 cache.

    The queue is filled ahead of the GPU, so what the host does in between is not measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flush = torch.empty(_CACHE_BYTES // 4, dtype=torch.int32, device=device)
        self.seed = 0

    def __call__(self, runs: Mapping[str, Callable[[], Any]], count: int) -> dict[str, Times]:
        events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in runs}
        for _ in range(count):
            order = list(runs)
            self.seed += 1
            random.Random(self.seed).shuffle(order)
            for name in order:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.flush.zero_()
                start.record()
                runs[name]()
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize(self.device)
        return {n: Times([s.elapsed_time(e) for s, e in found]) for n, found in events.items()}


#: Of a sustained block: what runs before the card has settled, and what counts.
_SETTLE_MS, _BLOCK_MS = 40.0, 60.0


class SustainedTimer:
    """Milliseconds per launch in blocks of one candidate, launches back to back.

    Large GEMMs are limited by power: how high the clock goes depends on what runs, and it takes
    some 10 ms to follow. Timings of single launches in turns give all candidates one clock; here
    each has its own. A block's first part is not counted.
    """

    def __init__(
        self, device: torch.device, settle_ms: float = _SETTLE_MS, block_ms: float = _BLOCK_MS
    ) -> None:
        self.device, self.settle_ms, self.block_ms = device, settle_ms, block_ms
        self.seed = 0

    def __call__(self, runs: Mapping[str, Callable[[], Any]], count: int) -> dict[str, Times]:
        once = {name: self._block(run, 3) for name, run in runs.items()}  # the first ones warm up
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(count):
            order = list(runs)
            self.seed += 1
            random.Random(self.seed).shuffle(order)
            for name in order:
                for _ in range(math.ceil(self.settle_ms / once[name])):
                    runs[name]()
                found[name].append(self._block(runs[name], math.ceil(self.block_ms / once[name])))
        return {name: Times(ms) for name, ms in found.items()}

    def _block(self, run: Callable[[], Any], calls: int) -> float:
        """Milliseconds per launch; the queue is full when it begins."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return max(start.elapsed_time(end) / calls, 1e-3)
