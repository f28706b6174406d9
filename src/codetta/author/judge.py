"""Right or wrong: one tensor against what :mod:`.oracle` expects of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from codetta.author.oracle import Bound, finite, norm
from codetta.author.report import TensorError, Where
from codetta.language.meaning import FP8, stored


@dataclass(frozen=True)
class Judged:
    """``reason`` is "" if the tensor is right."""

    error: TensorError
    reason: str = ""
    where: Where | None = None


def judge(name: str, got: Tensor, bound: Bound, tile: tuple[int, int]) -> Judged:
    """One tensor against its bound; a wrong one with its first wrong element, by tiles."""
    found = [_against(name, got, exact, bound, tile) for exact in bound.exact]
    return min(found, key=lambda j: (bool(j.reason), j.error.ratio))


def _against(name: str, got: Tensor, exact: Tensor, bound: Bound, tile: tuple[int, int]) -> Judged:
    kept = exact.reshape(got.shape)
    exact = stored(kept, got.dtype).double() if got.dtype in FP8 else kept
    wide = got.detach().double()
    allowed = _allowed(got, exact, bound)
    # A rounding or two decide whether what is next to the largest number becomes infinite.
    border = 4 * torch.finfo(got.dtype).eps
    like = [
        stored(c.double().reshape(got.shape), got.dtype).double()
        for c in (kept, kept * (1 + border), kept * (1 - border), *bound.classes)
    ]
    misplaced = _misplaced(wide, like)
    difference = finite(wide - exact).abs()
    for x in like:
        difference = torch.where(x.isfinite(), difference, 0.0)
    error = TensorError(tensor=name, error=norm(difference), budget=allowed)
    if misplaced.any():
        at = _first(misplaced.double(), tile)
        what = "NaN" if math.isnan(float(wide[at])) else "Inf"
        if math.isfinite(float(wide[at])):
            reason = f"{name} is a number where the reference is NaN or Inf"
        else:
            reason = f"{name} is {what} where the reference is not"
        return Judged(
            error.model_copy(update={"error": math.inf}),
            reason,
            _where(name, at, tile, exact, wide),
        )
    if not error.error <= allowed:
        times = error.ratio
        reason = f"{name} is {times:.3g} times its error budget from the reference in fp64"
        at = _first(difference, tile)
        return Judged(error, reason, _where(name, at, tile, exact, wide))
    return Judged(error)


def _allowed(got: Tensor, exact: Tensor, bound: Bound) -> float:
    info = torch.finfo(got.dtype)
    if got.dtype in FP8:
        largest = float(finite(exact).abs().max()) if exact.numel() else 0.0
        return 2 * bound.theirs + math.sqrt(1 + got.numel() / 4096) * info.eps * largest
    # Below the smallest normal number a rounding is no longer relative; GPUs flush fp32 there.
    single = torch.finfo(torch.float32)
    least = max(info.smallest_normal * info.eps, single.smallest_normal)
    relative = 2 * max(info.eps, bound.eps) + (8 * single.eps if info.bits < 64 else 0.0)
    return 2 * bound.theirs + relative * bound.addends + 2 * least * math.sqrt(max(got.numel(), 1))


def _misplaced(wide: Tensor, like: Sequence[Tensor]) -> Tensor:
    """Where ``wide`` is NaN or ±Inf and none of ``like`` is the same; or is a number, and none of
    them is one."""
    mine = _class(wide)
    agreed = torch.zeros_like(mine, dtype=torch.bool)
    for x in like:
        agreed |= mine == _class(x)
    return ~agreed


def _class(x: Tensor) -> Tensor:
    """0 for a number, 1 for NaN, 2 for Inf, 3 for -Inf."""
    kinds = (torch.isnan(x), torch.isposinf(x), torch.isneginf(x))
    return sum(
        (k.to(torch.int8) * i for i, k in enumerate(kinds, 1)),
        kinds[0].new_zeros((), dtype=torch.int8),
    )


def _first(badness: Tensor, tile: tuple[int, int]) -> tuple[int, ...]:
    """The worst element of the first tile that is not much better than the worst tile."""
    if not badness.ndim:
        return ()
    flat = badness if badness.ndim > 1 else badness[None]
    flat = flat.reshape(-1, flat.shape[-1])
    rows, cols = tile if badness.ndim > 1 else (1, max(tile))
    blocks = [
        (float(flat[i : i + rows, j : j + cols].max()), i, j)
        for i in range(0, flat.shape[0], rows)
        for j in range(0, flat.shape[1], cols)
    ]
    limit = max(b for b, _, _ in blocks) / 8
    _, i, j = next(b for b in blocks if b[0] >= limit)
    block = flat[i : i + rows, j : j + cols]
    at = divmod(int(block.argmax()), block.shape[1])
    row, column = i + at[0], j + at[1]
    return (row, column) if badness.ndim > 1 else (column,)


def _where(
    name: str, at: tuple[int, ...], tile: tuple[int, int], exact: Tensor, got: Tensor
) -> Where:
    of = tuple(i // t for i, t in zip(at, tile, strict=False)) if len(at) > 1 else ()
    if len(at) > 1:
        exact, got = (x.reshape(-1, x.shape[-1]) for x in (exact, got))
    return Where(tensor=name, tile=of, index=at, expected=float(exact[at]), got=float(got[at]))
