"""How a sum of fewer bits than fp32 lies in memory, the same for every backend.

``high`` (M, N) in bf16 holds the upper 16 bits of each element, ``low`` in uint8 what follows:

    24 bits    (M, N): the next byte
    20 bits    (M, 16 ⌈N / 32⌉): the next four bits, those of column c and c + 16 of each 32 in one
               byte, the lower and the upper half of it

A sum in 24 bits is cut off, which loses 3e-5 of it at most, and one in 20 bits is rounded to
nearest, 2.4e-4 at most.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GROUP = 32  # columns whose four bits are packed together


def low_columns(n: int, bits: int) -> int:
    """Columns of ``low`` for N columns of a sum."""
    return n if bits == 24 else -(-n // _GROUP) * _GROUP // 2


def joined(high: Tensor, low: Tensor, bits: int) -> Tensor:
    """The sum in fp32."""
    upper = high.view(torch.int16).int() << 16
    return (upper | lower_bits(low, high.shape[1], bits)).view(torch.float32)


def split_(total: Tensor, high: Tensor, low: Tensor, bits: int) -> None:
    """Put an fp32 sum into ``high`` and ``low``."""
    if bits == 20:
        total = rounded_to_20_bits(total)
    word = total.view(torch.int32)
    high.view(torch.int16).copy_(word >> 16)
    put_lower_bits(word, low, bits)


def rounded_to_20_bits(x: Tensor) -> Tensor:
    """Numbers whose upper 20 bits are those of x rounded to nearest; NaN as it is."""
    word = x.contiguous().view(torch.int32)
    return torch.where(x.isnan(), word, word + 0x800).view(torch.float32)


def lower_bits(low: Tensor, n: int, bits: int) -> Tensor:
    """The bits of ``low`` where they are in an fp32 number, (M, N) in int32."""
    if bits == 24:
        return low.int() << 8
    pairs = low.int().unflatten(1, (-1, 1, _GROUP // 2))
    return torch.cat([pairs & 15, pairs >> 4], 2).flatten(1)[:, :n] << 12


def put_lower_bits(word: Tensor, low: Tensor, bits: int) -> None:
    """The inverse: ``low`` of the bits (M, N) of fp32 numbers."""
    if bits == 24:
        low.copy_(word >> 8 & 255)
        return
    four = word >> 12 & 15
    four = torch.nn.functional.pad(four, (0, 2 * low.shape[1] - four.shape[1]))
    pairs = four.unflatten(1, (-1, 2, _GROUP // 2))
    low.copy_((pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1))
