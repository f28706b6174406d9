"""``codetta.linear_cross_entropy``: a head and its loss, without the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from codetta.autograd import refuse_transforms
from codetta.errors import LossArguments
from codetta.loss.arguments import check, check_targets, under_autocast
from codetta.loss.function import apply
from codetta.loss.head import Leaves
from codetta.loss.operator import WITH_AUTOGRAD
from codetta.loss.options import LinearCrossEntropyOutput, Logits, Options, Request
from codetta.loss.plan import MEMORY_LIMIT
from codetta.loss.vocabulary import WHOLE, Vocabulary


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items_in_batch: int | float | Tensor | None = None,
    label_smoothing: float = 0.0,
    token_weight: Tensor | None = None,
    row_scale: Tensor | None = None,
    column_scale: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    shift: bool = False,
    return_lse: bool = False,
    return_accuracy: bool = False,
    return_logits: bool = False,
    process_group: Any = None,
    chunk: int | None = None,
    schedule: str | None = None,
    memory_limit: int | None = None,
    accum_dtype: torch.dtype | None = None,
) -> Any:
    """Cross-entropy of the logits softcap(logit_scale (x weightᵀ + bias)), which are never stored.

    With ``row_scale`` r and ``column_scale`` γ, r ⊙ ((x ⊙ γ) weightᵀ) is in the place of x weightᵀ:
    the head of hidden states that a norm scales, without storing the normalized ones.

    The loss of a token with logits z and target t is, with ε = ``label_smoothing``,

        w (lse(z) − (1 − ε) z_t − ε mean(z) + z_loss lse(z)²),     lse(z) = log Σ e^z

    Args:
        x: hidden states (..., D); bf16, fp16, fp32 or fp64.
        weight: (V, D) as in nn.Linear, of x's dtype.
        target: int32 or int64, the shape of x without D, tokens in [0, V) or ``ignore_index``. On a
            CPU another value is an error. On a GPU nobody looks: such a token has z_t = 0.
        bias: (V,), of x's dtype.
        ignore_index: a target that does not count: its loss is 0.
        reduction: 'mean' divides the sum by Σ w over the tokens that count, 'sum', or 'none'.
        num_items_in_batch: divides in place of Σ w, for losses of micro-batches that are added up.
            With all targets ignored the loss is then 0, and with 'mean' alone NaN, as in PyTorch.
        label_smoothing: in [0, 1].
        token_weight: w, in the shape of the targets; differentiable.
        row_scale: r, in the shape of the targets, of any float dtype: such as the 1 / rms(x) of an
            RMSNorm. It belongs to the hidden state, so ``shift`` leaves it where it is. It is an
            input like another: that it depends on x is for autograd to know, outside.
        column_scale: γ (D,), of any float dtype: the weight of the norm. x ⊙ γ is formed chunk by
            chunk and rounded once to the dtype of x.
        softcap: c > 0: the logits are c tanh(. / c), as in Gemma 2.
        logit_scale: factor of the logits, before the cap.
        z_loss: weight of lse², which keeps logits from drifting (PaLM, arXiv 2204.02311).
        shift: the token at s predicts target s + 1, along the last dimension of the targets; the
            last token has none. ``token_weight`` moves along with the target. Without it
            targets are aligned with x already.
        return_lse, return_accuracy, return_logits: return also log Σ e^z (differentiable), how
            often the target has the largest logit, and the logits (without gradient; they take
            their M V elements of memory).
        process_group: the weight and the bias are this process's rows of a vocabulary cut over
            the group in order of rank; x and targets are the same in all of it.
        chunk: number of tokens whose logits are alive at a time; by default chosen with the
            schedule.
        schedule: 'forward' (gradients formed in the forward pass, for one-number losses) or
            'recompute' (in the backward, from logits computed again); by default the faster of
            those that take at most ``memory_limit`` bytes (1 GiB) beside inputs and gradients, see
            :mod:`codetta.loss.plan`.
        accum_dtype: what dW = Σ over chunks of tokens of dzᵀ x is summed in before it is rounded.
            None: in fp32 (fp64 for fp64 x), or of bf16 tensors in the upper 24 or 20 bits of fp32,
            where a sum of more bits (4 V D bytes in fp32) does not fit into ``memory_limit`` or
            costs time; that adds nothing to the error that can be measured, see
            :mod:`codetta.loss.plan`.
            torch.float32: never in less than fp32, at any price.

    Returns:
        The loss in fp32 (fp64 for fp64 x), () or for 'none' in the shape of the targets; if more
        is asked for, a :class:`~codetta.loss.LinearCrossEntropyOutput`.

    Differentiable once, in x, weight, bias, token_weight and both scales, for any upstream
    gradient; gradients have the dtype of their tensor. Under ``torch.autocast`` x, weight and bias
    are cast as for nn.Linear; the loss is fp32 anyway.

    Raises:
        CodettaError: a subclass per mistake, before anything runs; see :mod:`codetta.errors`.
    """
    check(
        x, weight, target, bias, token_weight, row_scale, column_scale, reduction,
        num_items_in_batch, label_smoothing, softcap, logit_scale, z_loss, shift, chunk, schedule,
        memory_limit, accum_dtype,
    )  # fmt: skip
    shape = target.shape
    target = target.long()
    if shift:
        target = _next(target, ignore_index)
        token_weight = None if token_weight is None else _next(token_weight, 0)
    vocabulary = WHOLE
    if process_group is not None:  # before a cast: sizes are remembered with the weight
        vocabulary = _parallel(process_group, weight, return_logits)
    x, weight, bias = under_autocast(x, weight, bias)
    if not torch.compiler.is_dynamo_compiling():
        given = (x, weight, bias, token_weight, row_scale, column_scale)
        refuse_transforms([t for t in given if t is not None])
    flat = target.reshape(-1)
    valid = flat != ignore_index
    check_targets(flat, valid, vocabulary.size(len(weight)))
    local = vocabulary.local(torch.where(valid, flat, -1), len(weight))

    compute = torch.float64 if x.dtype is torch.float64 else torch.float32
    factor = valid.to(compute)
    if token_weight is not None:
        factor = torch.where(valid, token_weight.reshape(-1).to(compute), 0.0)
    total = factor.sum()
    if reduction == "mean":
        # Not 0: what is added below makes the loss NaN, gradients are 0 as in PyTorch.
        counted = torch.where(total == 0, 1.0, total)
        divisor = counted if num_items_in_batch is None else num_items_in_batch
        if isinstance(divisor, Tensor):
            divisor = divisor.reshape(())  # of shape (1,) it could widen the loss
        factor = torch.where(valid, factor / divisor, 0.0)
    # Dynamo may take defaults for symbols (dynamic=True); compared with a number they are none.
    smoothing = 0.0 if label_smoothing == 0 else label_smoothing
    scale = 1.0 if logit_scale == 1 else logit_scale
    text = _request(
        bias is not None, scale, softcap or 0.0, smoothing, 0.0 if z_loss == 0 else z_loss,
        return_accuracy, return_logits, reduction != "none", schedule, chunk, memory_limit,
        row_scale is not None, accum_dtype is not None,
    )  # fmt: skip
    leaves = Leaves(
        x.reshape(-1, x.shape[-1]), weight, bias,
        None if column_scale is None else column_scale.to(compute),
        None if row_scale is None else row_scale.reshape(-1).to(compute),
    )  # fmt: skip
    if torch.compiler.is_dynamo_compiling():
        results = iter(WITH_AUTOGRAD(*leaves, local, valid, factor, text))
        loss, lse = next(results), next(results)
        hit = next(results) if return_accuracy else None
        logits = next(results) if return_logits else None
    else:
        loss, lse, hit, logits = apply(
            Request.parse(text), vocabulary, local, valid, leaves, factor
        )
    if reduction == "mean" and num_items_in_batch is None:
        loss = loss + torch.where(total == 0, float("nan"), 0.0)  # nothing to take a mean of
    if reduction == "none":
        loss = loss.reshape(shape)
    if not (return_lse or return_accuracy or return_logits):
        return loss
    return LinearCrossEntropyOutput(
        loss,
        lse.reshape(shape) if return_lse else None,
        None if hit is None else _accuracy(hit, valid, reduction, shape),
        None if logits is None else logits.reshape(*shape, len(weight)),
    )


def _next(x: Tensor, last: int) -> Tensor:
    """x[..., 1:] and ``last``."""
    return torch.nn.functional.pad(x, (0, 1), value=last)[..., 1:]  # of no tokens: none


def _accuracy(hit: Tensor, valid: Tensor, reduction: str, shape: torch.Size) -> Tensor:
    right = (hit & valid).float()
    if reduction == "none":
        return right.reshape(shape)
    return right.sum() / valid.sum() if reduction == "mean" else right.sum()


def _parallel(process_group: Any, weight: Tensor, keep_logits: bool) -> Vocabulary:
    from codetta.loss.parallel import sharded

    if torch.compiler.is_dynamo_compiling():
        raise LossArguments(
            first="process_group",
            second="torch.compile",
            reason="a group cannot be part of the operator that a compiled graph holds",
            fix="Call the loss outside the compiled function.",
        )
    return sharded(process_group, weight, keep_logits=keep_logits)


def _request(
    bias: bool,
    scale: float,
    cap: float,
    smoothing: float,
    z_loss: float,
    accuracy: bool,
    keep_logits: bool,
    scalar: bool,
    schedule: str | None,
    chunk: int | None,
    limit: int | None,
    row_scale: bool,
    wide_sums: bool,
) -> str:
    options = Options(
        Logits(bias, float(scale), float(cap), row_scale), float(smoothing), float(z_loss),
        bool(accuracy), bool(keep_logits),
    )  # fmt: skip
    limit = MEMORY_LIMIT if limit is None else limit
    return Request(options, scalar, schedule, chunk, limit, wide_sums=wide_sums).text


# Dynamo calls it at trace time and takes the text as a constant.
setattr(_request, "_dynamo_marked_constant", True)  # noqa: B010
