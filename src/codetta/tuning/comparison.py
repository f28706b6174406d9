"""Two sets of times compared: medians with bootstrap intervals, paired round by round.

Times of one round were taken within milliseconds of each other, so clocks and temperature are the
same for both, and their ratio is steadier than either of them. The interval is the percentile
bootstrap of the median (Efron 1979): 2000 resamples of the rounds, the middle 95 %.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

_RESAMPLES = 2000
_TAIL = 50  # 2.5 % of them on either side


class Interval(NamedTuple):
    """A median and the 95 % interval around it."""

    median: float
    low: float
    high: float

    def covers(self, value: float) -> bool:
        return self.low <= value <= self.high


def interval(values: Sequence[float]) -> Interval:
    """Median with a 95 % bootstrap interval; the same values give the same interval."""
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(values, k=len(values))) for _ in range(_RESAMPLES)
    )
    return Interval(statistics.median(values), medians[_TAIL], medians[_RESAMPLES - _TAIL - 1])


def unpaired(times: Sequence[float], base: Sequence[float]) -> Interval:
    """Ratio of the medians of times that were not taken in the same rounds, with its interval."""
    rng = random.Random(0)
    ratios = sorted(
        statistics.median(rng.choices(times, k=len(times)))
        / statistics.median(rng.choices(base, k=len(base)))
        for _ in range(_RESAMPLES)
    )
    middle = statistics.median(times) / statistics.median(base)
    return Interval(middle, ratios[_TAIL], ratios[_RESAMPLES - _TAIL - 1])


def ratio(times: Sequence[float], base: Sequence[float]) -> Interval:
    """Median of per-round ratios, with its interval."""
    return interval([t / b for t, b in zip(times, base, strict=True)])
