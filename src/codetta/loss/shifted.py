"""The loss head's chunk without a second look at the logits: exponentials shifted row by row.

The softmax of a row is e^(z − b) / Σ e^(z − b) for any shift b. With a b that is known before the
product, its epilogue can store E = e^(z − b) itself, and with T = Σ E

    lse = b + log T          dz = (g / T) ⊙ (E − T onehot)

is a row scale of a matrix that differs from the stored one in a single element per row. Row scales
commute with the products that follow: dx = (g / T) ⊙ (E' W), dW = E'ᵀ ((g / T) ⊙ x). So no pass
over M × V elements is left beside the three products, one chunk of them is alive instead of two,
and what is rounded to 16 bits has the full relative precision of E instead of that of z.

The shift is the largest of the target's logit and those of some columns spread over the vocabulary,
so E <= 1 in most rows. Too small a shift does no harm until T nears the largest number: fp32 and
bf16 reach to 2^127. Rows whose T exceeds 2^64 (the loss of such a row is above 44 unless the target
is ignored) are computed again with their largest logit as the shift, by a kernel that ends at once
where there is none. fp16 has no such range and does not come here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from codetta.backends.select import backend_for
from codetta.loss.epilogues import scaled_rows, shifted, weighted_rows
from codetta.loss.head import Head
from codetta.loss.options import Need, Options
from codetta.loss.vocabulary import WHOLE
from codetta.ops import run_gemm, run_pointwise

#: The largest Σ e^(z − b) that is left as it is.
LIMIT = 2.0**64
#: Columns whose largest logit bounds the shift from below, and the least distance between them: the
#: samples of all tokens must not be most of the logits where the vocabulary is small.
SAMPLED, APART = 64, 8
#: The least shift: finite where no logit is.
FLOOR = -(2.0**100)


def applies(options: Options, need: Need, dtype: torch.dtype, whole: bool, fold: bool) -> bool:
    """Whether a loss is lse − z_target of whole rows, all that this form knows."""
    plain = not (options.smoothing or options.z_loss or options.logits.cap or options.accuracy)
    plain &= not (options.keep_logits or options.slopes or need[2] or need[3] or fold)
    return plain and whole and dtype is not torch.float16


def head_applies(head: Head, need: Need) -> bool:
    fold, whole = head.column_scale is not None, head.vocabulary is WHOLE
    return applies(head.options, need, head.x.dtype, whole, fold)


def chunk(part: Head, base: Tensor, scale: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Statistics of a chunk of tokens, E' (rows, V) and the factor of its rows (rows,).

    ``base`` is what :func:`shifts` gives of them, ``scale`` the factor of each token's loss. E' is
    in the dtype of x, the rest in fp32 or fp64.
    """
    logits = part.options.logits
    operands = [*part.vectors, part.target[:, None], base[:, None]]
    e, total, logit = run_gemm(shifted(logits), part.x, part.weight.t(), operands)
    base, total = _repaired(part, e, base, total)
    lse, factor = _settled(part, e, base, total, logit, scale)
    return {"lse": lse, "logit": logit}, e, factor


def of_x(part: Head, e: Tensor, factor: Tensor) -> Tensor:
    """dx of the chunk."""
    (made,) = run_gemm(scaled_rows, e, part.weight, [factor[:, None]])
    return made


def weighted(part: Head, factor: Tensor) -> Tensor:
    """x ⊙ factor, what E'ᵀ is multiplied with for dW."""
    (m, d), operands = part.x.shape, [part.x, factor[:, None]]
    (made,) = run_pointwise(weighted_rows, operands, m, d, part.x.dtype, part.compute)
    return made


def _fused(part: Head) -> bool:
    """Whether the fused backend's kernels take the place of the definitions below."""
    known = part.x.is_cuda and part.compute is torch.float32
    return known and backend_for(part.x).name == "cuda"


# ---------------------------------------------------------------------------------- the shift
def shifts(part: Head) -> Tensor:
    """At most the rows' largest logits, up to rounding; finite unless a logit is +inf or NaN.

    Of all tokens at once: the product with the sampled columns is narrow, and few rows of it would
    leave most of the processors without work.
    """
    step = max(APART, len(part.weight) // SAMPLED)
    sampled = part.x @ part.weight[: step * SAMPLED : step].t()
    if _fused(part):
        from codetta.backends.cuda.triton_shift import shift

        return shift(part.x, part.weight, part.bias, part.leaves.row_scale,
                     part.options.logits.scale, part.target, sampled, step, FLOOR)  # fmt: skip
    return based(part, sampled, step)


def based(part: Head, sampled: Tensor, step: int) -> Tensor:
    """The definition, of the products with each ``step``-th row of the weight."""
    v = len(part.weight)
    at = slice(0, step * SAMPLED, step)
    sampled = sampled.to(part.compute)
    own = part.target.clamp(0, v - 1).long()
    target = (part.x * part.weight[own]).sum(1, dtype=part.compute)
    found = torch.maximum(
        _logits(part, sampled, None if part.bias is None else part.bias[at]).amax(1),
        _logits(part, target[:, None], None if part.bias is None else part.bias[own, None])[:, 0],
    )
    return found.clamp_min(FLOOR)


def _logits(part: Head, product: Tensor, bias: Tensor | None) -> Tensor:
    """Of products (rows, columns): scale (r ⊙ product + bias)."""
    if part.leaves.row_scale is not None:
        product = product * part.leaves.row_scale[:, None]
    if bias is not None:
        product = product + bias
    return product * part.options.logits.scale


# -------------------------------------------------------------------------- after the product
def _settled(
    part: Head, e: Tensor, base: Tensor, total: Tensor, logit: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """lse and factor of the rows; E becomes E' in place."""
    if _fused(part):
        from codetta.backends.cuda.triton_shift import settle

        return settle(e, part.target, base, total, logit, scale, part.leaves.row_scale,
                      part.options.logits.scale)  # fmt: skip
    return settled(part, e, base, total, logit, scale)


def settled(
    part: Head, e: Tensor, base: Tensor, total: Tensor, logit: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition."""
    lse = torch.where(base == torch.inf, base, base + total.log())
    _take_target(e, part.target, torch.exp(logit - base) - total)
    factor = scale * part.options.logits.scale / total
    if part.leaves.row_scale is not None:
        factor = factor * part.leaves.row_scale
    return lse, factor


def _take_target(e: Tensor, target: Tensor, value: Tensor) -> None:
    """e[i, target[i]] = value[i], in place, where the target is a column."""
    inside = (target >= 0) & (target < e.shape[1])
    at = torch.where(inside, target, 0).long()[:, None]
    e.scatter_(1, at, torch.where(inside[:, None], value[:, None].to(e.dtype), e.gather(1, at)))


def _repaired(part: Head, e: Tensor, base: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Shift and total of all rows, those above LIMIT computed again, e too, in place."""
    if _fused(part):
        from codetta.backends.cuda.triton_repair import repair

        return repair(part.x, part.weight, part.bias, part.leaves.row_scale,
                      part.options.logits.scale, e, base, total, LIMIT)  # fmt: skip
    return repaired(part, e, base, total)


def repaired(part: Head, e: Tensor, base: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The definition; it waits for the device."""
    rows = (total > LIMIT).nonzero()[:, 0]
    if not len(rows):
        return base, total
    z = part.x[rows].to(part.compute) @ part.weight.t().to(part.compute)
    few = part.leaves.row_scale
    if few is not None:
        z = z * few[rows, None]
    if part.bias is not None:
        z = z + part.bias
    z = z * part.options.logits.scale
    top = z.amax(1)
    found = torch.exp(z - top[:, None])
    e[rows] = found.to(e.dtype)
    return base.index_put((rows,), top), total.index_put((rows,), found.sum(1))
