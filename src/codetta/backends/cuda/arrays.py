"""Arrays as the mainloop reads them.

TMA wants 16-byte aligned base pointers and row pitches that are multiples of 16 bytes; vectors want
four elements. What does not meet that is copied into memory that does: shapes stay, only the pitch
is padded. Either axis of a matrix may be the contiguous one where ``either`` says so.

The small constant vectors (ones, rotary masks) are kept per device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from codetta.kept import kept

_TMA_BYTES = 16


def is_matrix(x: Tensor, *, either: bool) -> bool:
    """Whether TMA can read x (rows, cols) where it lies."""
    if x.data_ptr() % _TMA_BYTES:
        return False
    rows, cols = x.shape
    pitch, step = x.stride()
    per = _TMA_BYTES // x.element_size()
    if step == 1 and pitch >= cols and pitch % per == 0:
        return True
    return either and step != 1 and pitch == 1 and step >= rows and step % per == 0


def matrix(x: Tensor, *, either: bool = True) -> Tensor:
    """x, or a copy of it with a padded pitch."""
    return x if is_matrix(x, either=either) else empty_matrix(x.shape, x.dtype, x.device).copy_(x)


def empty_matrix(
    shape: tuple[int, int] | torch.Size, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """An uninitialized matrix whose pitch TMA accepts; contiguous if the columns allow it."""
    rows, cols = shape
    per = _TMA_BYTES // dtype.itemsize
    padded = torch.empty((rows, -(-cols // per) * per), dtype=dtype, device=device)
    return padded if padded.shape[1] == cols else padded[:, :cols]


def k_major(x: Tensor) -> Tensor:
    """x (rows, K) with contiguous rows: fp8 tensor cores read no other layout on Hopper."""
    return matrix(x, either=False)


@lru_cache(maxsize=64)
def allocator(device: torch.device) -> Callable[..., Tensor]:
    """(shape, strides, dtype) -> uninitialized memory on ``device``, which must be current.

    Inductor's own where it is for such a device: it parses no options and walks through no
    dispatcher, which takes a third of the time of ``torch.empty``.
    """
    from torch._C._dynamo import guards

    if (direct := getattr(guards, f"_empty_strided_{device.type}", None)) is not None:
        made: Callable[..., Tensor] = direct
        return made
    return lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device=device
    )


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of contiguous memory."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def is_vector(x: Tensor) -> bool:
    """Whether the (n, 1) or (1, n) array x can be loaded as a vector where it lies.

    16-bit vectors are copied two elements at a time: an odd one would end in its neighbour.
    """
    step = x.stride(0) if x.shape[1] == 1 else x.stride(1)
    whole = x.element_size() == 4 or x.numel() % 2 == 0
    return (step == 1 or x.numel() == 1) and whole and x.data_ptr() % (4 * x.element_size()) == 0


def vector(x: Tensor) -> Tensor:
    """x (n, 1) or (1, n) as (n,)."""
    flat = x.reshape(-1)
    if is_vector(x):
        return flat
    return flat.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def indices(x: Tensor, columns: int | None = None) -> Tensor:
    """An index column (M, 1) as a contiguous vector (M,).

    The kernel compares 32 bits: what lies beyond them must stay outside of the columns.

    Args:
        columns: makes -1 of what is not below it, where the last tile has columns of that number.
    """
    flat = x.reshape(-1).contiguous()
    if flat.dtype is torch.int64:
        flat = flat.clamp(-1, 2**31 - 1).to(torch.int32)
    if columns is not None:
        flat = flat.masked_fill(flat >= columns, -1)
    return flat if flat.data_ptr() % (4 * flat.element_size()) == 0 else flat.clone()


def number(x: Tensor) -> Tensor:
    """One element, in fp32."""
    return x.reshape(1).to(torch.float32)


def half_row(x: Tensor) -> Tensor:
    """A row half as wide as the accumulator, each element twice."""
    return x.reshape(-1).to(torch.float32).repeat_interleave(2)


def row_part(x: Tensor, part: int) -> Tensor:
    """Every second element of a row twice as wide as the accumulator."""
    return x.reshape(-1)[part::2].to(torch.float32, copy=True)


# ---------------------------------------------------------------------------------- constants
def ones(n: int, device: torch.device) -> Tensor:
    """n ones in fp32; a view of a vector that only grows."""
    size = 1 << max(12, (n - 1).bit_length())
    return kept(device, ("ones", size), lambda: torch.ones(size, device=device))[:n]


def turning(n: int, head_dim: int, rotary_dim: int, heads: int, device: torch.device) -> Tensor:
    """1 for the columns of n that a rotation turns, else 0."""

    def make() -> Tensor:
        column = torch.arange(n, device=device)
        turns = column % head_dim < rotary_dim
        if heads >= 0:
            turns &= column < heads * head_dim
        return turns.to(torch.float32)

    return kept(device, ("turning", n, head_dim, rotary_dim, heads), make)
