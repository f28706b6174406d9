"""Values that break kernels: NaN and infinities, huge, tiny and equal numbers, masks all 0 or 1,
indices at the edges and outside.

Each entry of :data:`SPECIAL` is ``change(kind, values, x, n, generator)``, with ``kind`` "a", "b"
or an operand's, ``values`` the operand's distribution and n the columns of the accumulator. It
returns what becomes of the array, or None if it stays as drawn.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Change = Callable[[str, str, Tensor, int, torch.Generator], Tensor | None]
SPECIAL: dict[str, Change] = {}
_INF = float("inf")
#: Distributions whose values mean something that a special value would break.
_FIXED = ("mask", "keep", "index", "position", "angles", "scale", "gain")


def _special(change: Change) -> Change:
    SPECIAL[change.__name__.strip("_")] = change
    return change


def _sprinkled(x: Tensor, g: torch.Generator, *values: float, share: float = 0.05) -> Tensor:
    """x with each of ``values`` in about ``share`` of its elements, and at least in one."""
    x = x.clone()
    flat = x.view(-1)
    for value in values:
        count = max(1, int(share * flat.numel()))
        if flat.numel():
            flat[torch.randint(0, flat.numel(), (count,), generator=g)] = value
    return x


@_special
def nan(kind: str, values: str, x: Tensor, n: int, g: torch.Generator) -> Tensor | None:
    """NaN in two rows of a and in a few elements of a tile."""
    if kind == "a":
        x = x.clone()
        x[1::7, :1] = float("nan")
        return x
    return _sprinkled(x, g, float("nan")) if kind == "tile" and values not in _FIXED else None


@_special
def infinities(kind: str, values: str, x: Tensor, n: int, g: torch.Generator) -> Tensor | None:
    """±Inf in rows of a, and in elements of tiles, rows and columns."""
    if kind == "a":
        x = x.clone()
        x[1::7, :1] = _INF
        x[3::7, :1] = -_INF
        return x
    plain = kind in ("tile", "row", "col") and values == "normal"
    return _sprinkled(x, g, _INF, -_INF, share=0.02) if plain else None


@_special
def overflow(kind: str, values: str, x: Tensor, n: int, g: torch.Generator) -> Tensor | None:
    """Products near the largest number of the dtype, which squares and exponentials exceed."""
    if kind == "a":
        largest = 2.0**12 if x.dtype is torch.float16 else 2.0**70
        return x * largest
    return None


@_special
def large(kind: str, values: str, x: Tensor, n: int, g: torch.Generator) -> Tensor | None:
    """Products of a few hundred: saturated activations, peaked softmaxes."""
    return x * 64.0 if kind == "a" else None


@_special
def tiny(kind: str, values: str, x: Tensor, n: int, g: torch.Generator) -> Tensor | None:
    """Products below the smallest normal number of the dtype or not far above it."""
    if kind == "a":
        return x * (2.0**-18 if x.dtype is torch.float16 else 2.0**-110)
    return None


@_special
def shifted(kind: str, values: str, x: Tensor, n: int, g: torch.Generator) -> Tensor | None:
    """Products around 100 with a spread of 1: what a variance from Σx² - (Σx)² is lost on."""
    if kind == "a":
        x = x.clone()
        x[:, :1] = 8.0
        return x
    if kind == "b":
        x = x.clone()
        x[:1] = 12.5
        return x
    return None


@_special
def equal(kind: str, values: str, x: Tensor, n: int, g: torch.Generator) -> Tensor | None:
    """All rows of the product have equal elements: ties, and a variance of 0."""
    return x[:, :1].expand(x.shape) if kind == "b" else None


@_special
def zeros(kind: str, values: str, x: Tensor, n: int, g: torch.Generator) -> Tensor | None:
    """A product of zeros."""
    return torch.zeros_like(x) if kind == "a" else None


@_special
def all_masked(kind: str, values: str, x: Tensor, n: int, g: torch.Generator) -> Tensor | None:
    """Masks of zeros, and indices that are no column."""
    if kind == "index":
        outside = torch.tensor([-1, -100, n, n + 1, 2**40, -(2**40)])
        return outside[torch.arange(x.shape[0]) % len(outside)]
    return torch.zeros_like(x) if values in ("mask", "keep") else None


@_special
def none_masked(kind: str, values: str, x: Tensor, n: int, g: torch.Generator) -> Tensor | None:
    """Masks of ones, and indices of the first and the last column."""
    if kind == "index":
        return (torch.arange(x.shape[0]) % 2) * (n - 1)
    return torch.ones_like(x) if values in ("mask", "keep") else None
