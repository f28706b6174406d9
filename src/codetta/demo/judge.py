"""The criteria of the demo. Each one passes or fails and says the number that decided.

    loss, fp32        |codetta − stock| ≤ 1e-4 |stock|                          at every step
    loss, 16-bit      |codetta − fp32| ≤ 2 |stock − fp32| + 0.01                at every step
    gradients         ‖g − g64‖ ≤ 2 ‖g_stock − g64‖ + 2 eps(dtype) ‖g64‖         for every parameter
    kernels           counted by watching = computed by formula, in number and in bytes

The gradient budget of the numerics contract ends in 2 eps ‖Σ |addends|‖, for a weight gradient
‖ |dz|ᵀ |x| ‖, which cannot be had from outside the model. ‖g64‖ stands in for it: it is never
larger, since |Σ addends| ≤ Σ |addends| elementwise, so the demo is the stricter of the two.

NaN and Inf fail every comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from codetta.demo.kernels import GEMM, MEMORY, CostRow, sums

LOSS_TOLERANCE_FP32 = 1e-4
LOSS_SLACK_16BIT = 0.01


@dataclass(frozen=True)
class Criterion:
    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class LossStep:
    """How far CODA's loss is from the yardstick at one step, and how far it may be."""

    step: int
    deviation: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.deviation <= self.allowed < math.inf


@dataclass(frozen=True)
class Gradient:
    """The error of one parameter's gradient at step 1. All norms are Frobenius norms in fp64."""

    name: str
    norm: float  # ‖g64‖
    stock_error: float  # ‖g_stock − g64‖
    codetta_error: float  # ‖g_codetta − g64‖
    budget: float

    @property
    def passed(self) -> bool:
        return self.codetta_error <= self.budget < math.inf

    @property
    def used(self) -> float:
        """The share of the budget that is used; 1 is the limit."""
        return self.codetta_error / self.budget if self.budget > 0 else math.inf


def losses_fp32(stock: Sequence[float], codetta: Sequence[float]) -> list[LossStep]:
    """Deviations are relative to the stock loss."""
    return [
        LossStep(step, abs(c - s) / abs(s), LOSS_TOLERANCE_FP32)
        for step, (s, c) in enumerate(zip(stock, codetta, strict=True), 1)
    ]


def losses_16bit(
    fp32: Sequence[float], stock: Sequence[float], codetta: Sequence[float]
) -> list[LossStep]:
    """Deviations are absolute, from the fp32 loss."""
    return [
        LossStep(step, abs(c - y), 2 * abs(s - y) + LOSS_SLACK_16BIT)
        for step, (y, s, c) in enumerate(zip(fp32, stock, codetta, strict=True), 1)
    ]


def gradients(
    norms: Mapping[str, float],
    stock: Mapping[str, float],
    codetta: Mapping[str, float],
    dtype: torch.dtype,
) -> list[Gradient]:
    """One per parameter of the stock model; one that CODA has no gradient for has the error NaN."""
    eps = torch.finfo(dtype).eps
    return [
        Gradient(
            name,
            norm,
            stock[name],
            codetta.get(name, math.nan),
            budget=2 * stock[name] + 2 * eps * norm,
        )
        for name, norm in norms.items()
    ]


def judge_losses(rows: Sequence[LossStep], what: str) -> Criterion:
    """`what` names the deviation: "relative difference from stock", say."""
    worst = max(rows, key=_share_of_allowed)
    failed = sum(not row.passed for row in rows)
    verdict = f"{failed} of {len(rows)} steps over" if failed else "every step within"
    return Criterion(
        "loss",
        failed == 0,
        f"{verdict} the limit; {what} at worst {worst.deviation:.2g} of {worst.allowed:.2g} "
        f"allowed (step {worst.step})",
    )


def _share_of_allowed(row: LossStep) -> float:
    share = row.deviation / row.allowed
    return share if math.isfinite(share) else math.inf


def judge_gradients(rows: Sequence[Gradient]) -> Criterion:
    worst = max(rows, key=lambda row: row.used if math.isfinite(row.used) else math.inf)
    failed = sum(not row.passed for row in rows)
    verdict = (
        f"{failed} of {len(rows)} tensors over" if failed else f"all {len(rows)} tensors within"
    )
    return Criterion(
        "gradients",
        failed == 0,
        f"{verdict} the error budget; at worst {worst.used:.0%} of it is used ({worst.name})",
    )


def judge_kernels(name: str, watched: Iterable[CostRow], computed: Iterable[CostRow]) -> Criterion:
    """GEMMs and memory-bound kernels only: what attention launches is its library's affair."""
    seen, formula = sums(watched), sums(computed)
    if not any(seen[kind].kernels for kind in (GEMM, MEMORY)):
        return Criterion(
            f"kernels, {name}",
            False,
            "no kernel was seen: the layers of a model are marked with "
            'torch.profiler.record_function("region:layers"), and a compiled model must run '
            "codetta's operators",
        )
    differences = [
        f"{kind}: watched {seen[kind].kernels} kernels, {seen[kind].bytes} bytes; "
        f"computed {formula[kind].kernels}, {formula[kind].bytes}"
        for kind in (GEMM, MEMORY)
        if seen[kind] != formula[kind]
    ]
    agreed = (
        f"watched = computed: {seen[GEMM].kernels} GEMMs, {seen[MEMORY].kernels} memory-bound "
        f"kernels, {(seen[GEMM].bytes + seen[MEMORY].bytes) / 1e6:.1f} MB"
    )
    return Criterion(f"kernels, {name}", not differences, "; ".join(differences) or agreed)
