"""Rows of a chunk of the loss head whose exponentials overflowed, computed again.

One program per row; where a row's total is within the limit it reads that number and ends. Others
compute their logits twice, first for the largest and the sum, then for the exponentials: slow, and
meant for a row in a million. See :mod:`codetta.loss.shifted`.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from codetta.backends.cuda.capture import refuse
from codetta.backends.cuda.triton_kernels import on_device

_COLUMNS, _DEPTH = 64, 128
_SEEN: set[tuple[object, ...]] = set()


@triton.jit
def _logits(x, w, bias, rows, r, v0, scale, words, width, x_stride, w_stride, BIAS: tl.constexpr,
            ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """z of one row and COLUMNS columns, -inf beyond the last; these, and which of them exist."""
    columns = v0 + tl.arange(0, COLUMNS)
    inside = columns < words
    z = tl.zeros((COLUMNS,), tl.float32)
    for d0 in range(0, width, DEPTH):
        depth = d0 + tl.arange(0, DEPTH)
        a = tl.load(x + r * x_stride + depth, mask=depth < width, other=0.0).to(tl.float32)
        b = tl.load(w + columns.to(tl.int64)[:, None] * w_stride + depth[None, :],
                    mask=inside[:, None] & (depth < width)[None, :], other=0.0)  # fmt: skip
        z += tl.sum(b.to(tl.float32) * a[None, :], 1)
    if ROWS:
        z *= tl.load(rows + r).to(tl.float32)
    if BIAS:
        z += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, z * scale, float("-inf")), columns, inside


# Where a chunk begins decides how its numbers per row are aligned; that must not compile anew.
@triton.jit(do_not_specialize_on_alignment=["base", "total"])
def _repair(x, w, bias, rows, e, base, total, new_base, new_total, scale, limit, words, width,
            x_stride, w_stride, e_stride, BIAS: tl.constexpr, ROWS: tl.constexpr,
            COLUMNS: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    found = tl.load(total + r)
    top = tl.load(base + r)
    if found > limit:
        top = tl.full((), -3.0e38, tl.float32)
        found = tl.full((), 0.0, tl.float32)
        for v0 in range(0, words, COLUMNS):
            z, columns, inside = _logits(x, w, bias, rows, r, v0, scale, words, width, x_stride,
                                         w_stride, BIAS, ROWS, COLUMNS, DEPTH)  # fmt: skip
            larger = tl.maximum(top, tl.max(z, 0))
            found = found * tl.exp(top - larger) + tl.sum(tl.exp(z - larger), 0)
            top = larger
        for v0 in range(0, words, COLUMNS):
            z, columns, inside = _logits(x, w, bias, rows, r, v0, scale, words, width, x_stride,
                                         w_stride, BIAS, ROWS, COLUMNS, DEPTH)  # fmt: skip
            value = tl.exp(z - top).to(e.dtype.element_ty)
            tl.store(e + r * e_stride + columns, value, mask=inside)
    tl.store(new_base + r, top)
    tl.store(new_total + r, found)


def repair(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    scale: float,
    e: Tensor,
    base: Tensor,
    total: Tensor,
    limit: float,
) -> tuple[Tensor, Tensor]:
    """Shift and total of all rows, those above ``limit`` computed again, e too, in place.

    Args:
        x, weight: (M, D) and (V, D), their last dimension contiguous.
        bias, row_scale: (V,) and (M,), or None: z = scale (row_scale ⊙ (x weightᵀ) + bias).
        e: (M, V), e^(z − base).
        base, total: (M,) in fp32.

    Raises:
        ColdCapture: the kernel must be compiled and a stream is being captured.
    """
    x, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x, weight))
    strides = (x.stride(0), weight.stride(0), e.stride(0))
    key = (x.dtype, e.dtype, x.device, bias is None, row_scale is None, *weight.shape, *strides)
    if key not in _SEEN:
        refuse("the loss head's repair")
        _SEEN.add(key)
    base, total = base.contiguous(), total.contiguous()
    made = torch.empty_like(base), torch.empty_like(total)
    with on_device(x):
        _repair[(len(x),)](
            x, weight, x if bias is None else bias.contiguous(),
            x if row_scale is None else row_scale.contiguous(), e, base, total, *made,
            scale, limit, weight.shape[0], weight.shape[1],
            *strides,
            BIAS=bias is not None, ROWS=row_scale is not None, COLUMNS=_COLUMNS, DEPTH=_DEPTH,
        )  # fmt: skip
    return made
