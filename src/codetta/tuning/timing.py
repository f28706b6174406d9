"""Times of GPU work, candidates interleaved so that clocks and temperature are the same for all."""

from __future__ import annotations

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
