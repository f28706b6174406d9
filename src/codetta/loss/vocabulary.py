"""Where the vocabulary lies: all of it here, or a slice of it on each process of a group.

The loss is computed row by row from statistics of the logits, and the only other quantity that runs
over the vocabulary is dz W, of which dx and the gradient of the column scale are made. So this is
all that a vocabulary cut over processes changes: the targets become numbers of local rows, the
statistics of the slices are combined, these gradients of the slices are added.
:mod:`codetta.loss.parallel` does that with collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Statistics:
    """Per row of a chunk, (rows,) in fp32 or fp64.

    Attributes:
        lse: log Σ e^z.
        logit: z at the target, 0 where that is elsewhere.
        total: Σ z, if asked for.
        top: max z, if asked for.
        mean_slope, target_slope, total_slope: Σ softmax(z) q, q at the target (0 where that is
            elsewhere) and Σ q of the slopes q = dz/dr, if asked for.
    """

    lse: Tensor
    logit: Tensor
    total: Tensor | None = None
    top: Tensor | None = None
    mean_slope: Tensor | None = None
    target_slope: Tensor | None = None
    total_slope: Tensor | None = None

    @staticmethod
    def of(named: dict[str, Tensor]) -> Statistics:
        return Statistics(**{f.name: named[f.name] for f in fields(Statistics) if f.name in named})

    @property
    def named(self) -> dict[str, Tensor]:
        """Those that there are."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in found.items() if x is not None}


class Vocabulary:
    """All rows of the weight are here."""

    def size(self, rows: int) -> int:
        """Number of tokens of the vocabulary, of which the weight has ``rows``."""
        return rows

    def largest(self, rows: int) -> int:
        """The most rows that any process has: schedules must be the same everywhere."""
        return rows

    def local(self, target: Tensor, rows: int) -> Tensor:
        """Targets as rows of the weight, negative or >= ``rows`` for a target elsewhere."""
        return target

    def combined(self, part: Statistics) -> Statistics:
        """Statistics over the whole vocabulary of those over the rows that are here."""
        return part

    def summed(self, gradient: Tensor) -> Tensor:
        """Gradient of the hidden states, or of their scale, from that of the rows that are here."""
        return gradient


WHOLE = Vocabulary()
