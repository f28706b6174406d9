"""What the loss head does row by row around its products: one launch before all chunks, and one in
each after its first product.

In PyTorch these are some 25 kernels and a gathered copy of the weight's rows, as large as x.
Definitions and meaning: :mod:`codetta.loss.shifted`.
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

#: Elements of a row that one step of the dot product takes, 16 bytes a thread in 16 bits.
_DEPTH = 1024
#: Rows of a program of :func:`settle`, one a thread.
_BLOCK = 128
_SEEN: set[tuple[object, ...]] = set()


@triton.jit
def _larger(a, b):
    """NaN if one of them is, as in torch.maximum and amax."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


# Where a chunk begins decides how its numbers per row are aligned; that must not compile anew.
@triton.jit(
    do_not_specialize=["scale", "floor", "count", "step", "words"],
    do_not_specialize_on_alignment=["rows", "target", "sampled", "made"],
)
def _shift(x, w, bias, rows, target, sampled, made, scale, floor, count, step, words, width,
           x_stride, w_stride, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
           DEPTH: tl.constexpr):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    own = tl.minimum(tl.maximum(tl.load(target + r).to(tl.int64), 0), words - 1)
    sums = tl.zeros((DEPTH,), tl.float32)
    for d0 in range(0, width, DEPTH):
        depth = d0 + tl.arange(0, DEPTH)
        inside = depth < width
        a = tl.load(x + r * x_stride + depth, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(w + own * w_stride + depth, mask=inside, other=0.0).to(tl.float32)
        sums += a * b
    hit = tl.sum(sums, 0)
    column = tl.arange(0, COLUMNS)
    exists = column < count
    z = tl.load(sampled + r * count + column, mask=exists, other=0.0).to(tl.float32)
    if ROWS:
        factor = tl.load(rows + r)
        hit *= factor
        z *= factor
    if BIAS:
        hit += tl.load(bias + own).to(tl.float32)
        z += tl.load(bias + column * step, mask=exists, other=0.0).to(tl.float32)
    z = tl.where(exists, z * scale, float("-inf"))
    top = _larger(tl.reduce(z, 0, _larger), hit * scale)
    tl.store(made + r, _larger(top, floor))


@triton.jit(
    do_not_specialize=["logit_scale", "count", "words"],
    do_not_specialize_on_alignment=[
        "e", "target", "base", "total", "logit", "scale", "rows", "lse", "factor"
    ],
)  # fmt: skip
def _settle(e, target, base, total, logit, scale, rows, lse, factor, logit_scale, count, words,
            e_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = r < count
    shift = tl.load(base + r, mask=inside, other=0.0)
    sum_ = tl.load(total + r, mask=inside, other=1.0)
    found = tl.where(shift == float("inf"), shift, shift + tl.log(sum_))
    tl.store(lse + r, found, mask=inside)
    value = tl.exp(tl.load(logit + r, mask=inside, other=0.0) - shift) - sum_
    at = tl.load(target + r, mask=inside, other=-1).to(tl.int64)
    tl.store(e + r * e_stride + at, value.to(e.dtype.element_ty), mask=(at >= 0) & (at < words))
    # A total may be as large as 2^127, which the hardware's quick division makes a 0 of.
    weight = tl.div_rn(tl.load(scale + r, mask=inside, other=0.0) * logit_scale, sum_)
    if ROWS:
        weight *= tl.load(rows + r, mask=inside, other=0.0)
    tl.store(factor + r, weight, mask=inside)


def shift(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    scale: float,
    target: Tensor,
    sampled: Tensor,
    step: int,
    floor: float,
) -> Tensor:
    """The largest logit of each row among its target's and sampled columns', at least ``floor``.

    Args:
        x, weight: (M, D) and (V, D), in 16 bits or fp32.
        bias, row_scale: (V,) and (M,), or None: logits are
            scale (row_scale ⊙ (x weightᵀ) + bias).
        target: (M,), moved into [0, V).
        sampled: (M, S), x times each ``step``-th row of the weight, the first S of them.

    Returns:
        (M,) in fp32, NaN where one of the logits is.

    Raises:
        ColdCapture: the kernel must be compiled and a stream is being captured.
    """
    x, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x, weight))
    offsets = x if bias is None else bias.contiguous()
    strides = (x.stride(0), weight.stride(0))
    columns = triton.next_power_of_2(sampled.shape[1])
    _compiled("the loss head's shift", x, target, weight.dtype, offsets.dtype, bias is None,
              row_scale is None, *weight.shape, *strides, columns,
              *(t.data_ptr() % 16 == 0 for t in (x, weight, offsets)))  # fmt: skip
    made = torch.empty(len(x), dtype=torch.float32, device=x.device)
    with on_device(x):
        _shift[(len(x),)](
            x, weight, offsets, x if row_scale is None else row_scale.contiguous(),
            target.contiguous(), sampled.contiguous(), made, scale, floor, sampled.shape[1], step,
            *weight.shape, *strides,
            BIAS=bias is not None, ROWS=row_scale is not None, COLUMNS=columns, DEPTH=_DEPTH,
        )  # fmt: skip
    return made


def settle(
    e: Tensor,
    target: Tensor,
    base: Tensor,
    total: Tensor,
    logit: Tensor,
    scale: Tensor,
    row_scale: Tensor | None,
    logit_scale: float,
) -> tuple[Tensor, Tensor]:
    """lse = base + log(total) and the factor scale logit_scale / total (⊙ row_scale) of each row.

    In place e[i, target[i]] = e^(logit − base) − total, where the target is a column.

    Args:
        e: (M, V), its last dimension contiguous, in 16 bits or fp32.
        target: (M,).
        base, total, logit, scale, row_scale: (M,) in fp32.

    Raises:
        ColdCapture: the kernel must be compiled and a stream is being captured.
    """
    assert e.stride(1) == 1
    _compiled("the loss head's factors", e, target, row_scale is None, e.stride(0))
    rows = [t.contiguous() for t in (target, base, total, logit, scale)]
    lse, factor = torch.empty_like(rows[1]), torch.empty_like(rows[1])
    with on_device(e):
        _settle[(triton.cdiv(len(e), _BLOCK),)](
            e, *rows, rows[1] if row_scale is None else row_scale.contiguous(), lse, factor,
            logit_scale, *e.shape, e.stride(0), ROWS=row_scale is not None, BLOCK=_BLOCK,
        )  # fmt: skip
    return lse, factor


def _compiled(what: str, x: Tensor, other: Tensor, *more: object) -> None:
    """Refuse a capture where what Triton compiles anew for has not been seen."""
    key = (what, x.dtype, other.dtype, x.device, *more)
    if key not in _SEEN:
        refuse(what)
        _SEEN.add(key)
