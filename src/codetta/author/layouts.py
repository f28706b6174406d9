"""Ways for an array to lie in memory. The memory around it is NaN (or indices of no column), so
that a kernel that reads past its array is found out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_NO_COLUMN = -(2**40)


def plain(x: Tensor) -> Tensor:
    """Contiguous."""
    return x


def transposed(x: Tensor) -> Tensor:
    """The columns of a matrix are contiguous, not its rows."""
    return x.mT.contiguous().mT if x.ndim > 1 else x


def within(x: Tensor, before: int, after: int) -> Tensor:
    """In the middle of larger memory, ``before`` elements in on every axis."""
    memory = _filled(x, tuple(s + before + after for s in x.shape))
    view = memory[tuple(slice(before, before + s) for s in x.shape)]
    return view.copy_(x)


def pitched(x: Tensor) -> Tensor:
    """Rows are further apart than they are long; pointers stay aligned."""
    return within(x, 16, 16 + -x.shape[-1] % 16) if x.ndim else x


def offset(x: Tensor) -> Tensor:
    """No pointer and no pitch is aligned."""
    return within(x, 1, 2) if x.ndim else x


def spread(x: Tensor) -> Tensor:
    """Every second element."""
    if not x.ndim:
        return x
    memory = _filled(x, (*x.shape[:-1], 2 * x.shape[-1]))
    return memory[..., ::2].copy_(x)


def expanded(x: Tensor) -> Tensor:
    """One column (of a vector, one number) for all, at stride 0; other values than x's."""
    if not x.ndim or not x.shape[-1]:
        return x
    return x[..., :1].expand(x.shape)


def _filled(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    if x.dtype.itemsize == 1:  # fp8 is not filled on every device
        return torch.zeros(shape, dtype=torch.uint8, device=x.device).fill_(0x7F).view(x.dtype)
    return x.new_full(shape, float("nan") if x.is_floating_point() else _NO_COLUMN)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (plain, transposed, pitched, offset, spread, expanded)
}
