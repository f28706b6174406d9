"""Does the verification itself have teeth? Wrong results that it must reject.

A budget can be so wide, or data so uninteresting, that anything passes: zeros, or values 10 % off.
That is a fault of the task, and must not look like a pass. So what a verified candidate returned is
broken in each of these ways, and one of the cases must reject it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from codetta.author.judge import judge
from codetta.author.oracle import Bound
from codetta.language.meaning import FP8, stored


def zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def sign_flipped(x: Tensor) -> Tensor:
    return (-x.double()).to(x.dtype)


def ten_percent_more(x: Tensor) -> Tensor:
    return stored(x.double() * 1.1, x.dtype)


def shifted_by_one(x: Tensor) -> Tensor:
    """Each row's (or column's) value in the place of the next one's."""
    return x.view(torch.uint8).roll(1, 0).view(x.dtype) if x.dtype in FP8 else x.roll(1, 0)


def lower_precision(x: Tensor) -> Tensor:
    """With the digits of the next narrower dtype."""
    narrow = {torch.float64: torch.float32, torch.float32: torch.bfloat16}
    narrower = narrow.get(x.dtype, torch.float8_e5m2)
    wide = x.double()
    if narrower is torch.float8_e5m2:  # its digits without its range
        scale = torch.exp2(torch.floor(torch.log2(wide.abs().clamp_min(1e-30))))
        return stored((wide / scale).to(narrower).double() * scale, x.dtype)
    return wide.to(narrower).to(x.dtype)


MUTANTS: tuple[Callable[[Tensor], Tensor], ...] = (
    zeros, sign_flipped, ten_percent_more, shifted_by_one, lower_precision,
)  # fmt: skip

#: One case: what came back, and its bounds.
Outcome = tuple[Mapping[str, Tensor], Mapping[str, Bound]]


def tried(outcomes: Sequence[Outcome]) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    """Outputs, each with the ways of breaking it; a single number cannot be shifted."""
    return [
        (name, mutant)
        for name, value in (outcomes[0][0] if outcomes else {}).items()
        for mutant in MUTANTS
        if value.ndim or mutant is not shifted_by_one
    ]


def toothless(outcomes: Sequence[Outcome]) -> list[str]:
    """OUTPUT "passes as" MUTANT, for each wrong result that no case rejects."""
    return [
        f"{name} passes as {mutant.__name__.replace('_', ' ')}"
        for name, mutant in tried(outcomes)
        if not any(_rejected(name, mutant, made, bounds) for made, bounds in outcomes)
    ]


def _rejected(
    name: str,
    mutant: Callable[[Tensor], Tensor],
    made: Mapping[str, Tensor],
    bounds: Mapping[str, Bound],
) -> bool:
    return bool(judge(name, mutant(made[name].detach()), bounds[name], (128, 128)).reason)
