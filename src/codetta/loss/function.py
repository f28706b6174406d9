"""Derivatives of the loss head: an autograd.Function around its two passes.

With the schedule 'forward' the gradients exist when the forward pass ends, but for the one number
that comes from upstream. The first backward multiplies them by it in place and hands their memory
out; another one (``retain_graph=True``), or a gradient that arrives at the log-sum-exps, computes
the logits again. The row scale has its gradient from numbers of the forward pass in any case.

Eager calls and compiled graphs share this Function: it is also the Autograd kernel of the operator
``codetta::linear_cross_entropy``, and where a compiler is looking, its passes are operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from codetta.autograd import _Undifferentiable
from codetta.backends.select import backend_for, chosen_backend, use_backend
from codetta.loss import operator
from codetta.loss.head import Leaves
from codetta.loss.options import Request
from codetta.loss.vocabulary import Vocabulary
from codetta.plan.operator import is_traced

NAME = "linear_cross_entropy"


def apply(
    request: Request,
    vocabulary: Vocabulary,
    target: Tensor,
    valid: Tensor,
    leaves: Leaves,
    factor: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """loss, lse, hit, logits; the last two if they were asked for, without gradient.

    Canonical tensors as in :mod:`codetta.loss.engine`. factor (M,) multiplies each token's loss and
    gets a gradient; where ``valid`` is False the loss is 0 whatever the logits are.
    """
    if not torch.is_grad_enabled():  # a Function sees what requires grad, not whether it counts
        given = leaves._asdict().items()
        leaves = leaves._replace(**{n: t.detach() for n, t in given if t is not None})
        factor = factor.detach()
    made: tuple[Tensor, Tensor, Tensor | None, Tensor | None] = LinearCrossEntropy.apply(
        request, vocabulary, target, valid, factor, *leaves
    )
    return made


class LinearCrossEntropy(torch.autograd.Function):
    """The Function of :func:`apply`."""

    @staticmethod
    def forward(
        ctx: Any,
        request: Request,
        vocabulary: Vocabulary,
        target: Tensor,
        valid: Tensor,
        factor: Tensor,
        *tensors: Any,
    ) -> tuple[Tensor | None, ...]:
        leaves, (*need, row_scale) = Leaves(*tensors), ctx.needs_input_grad[5:]
        request = operator.settled(request.needing(tuple(need), row_scale), vocabulary, leaves)
        with torch.no_grad():
            made = operator.forward(request, vocabulary, leaves, target, factor)
            losses = torch.where(valid, made.losses, 0.0)
            slopes, lse_slopes = made.slopes or (None, None)
            if slopes is not None:
                slopes = torch.where(valid, slopes, 0.0)
            loss = (losses * factor).sum() if request.scalar else losses * factor
        ctx.set_materialize_grads(False)
        ctx.request, ctx.vocabulary, ctx.backend = request, vocabulary, chosen_backend()
        ctx.gradients = made.gradients
        ctx.save_for_backward(
            *leaves, target, factor, made.lse, losses, slopes, lse_slopes
        )  # fmt: skip
        ctx.mark_non_differentiable(*(t for t in (made.hit, made.logits) if t is not None))
        return loss, made.lse, made.hit, made.logits

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        d_loss, d_lse = cotangents[:2]
        if d_loss is None and d_lse is None:
            return (None,) * 10
        # Autograd may run this in a thread of its own, which knows nothing of use_backend.
        with torch.no_grad(), use_backend(ctx.backend):
            gradients = _gradients(ctx, d_loss, d_lse)
        if torch.is_grad_enabled():  # create_graph=True: what we return must not look constant
            gradients = _Undifferentiable.guard(NAME, gradients)
        return (None, None, None, None, *gradients)


def _scaled(gradient: Tensor, by: Tensor) -> Tensor:
    """gradient *= by, in place, for a 0-d tensor."""
    fitting = gradient.is_cuda and gradient.is_contiguous() and by.dtype is torch.float32
    if is_traced(gradient) or not fitting or backend_for(gradient).name != "cuda":
        return gradient.mul_(by)
    from codetta.backends.cuda.triton_scale import scale_

    return scale_(gradient, by.to(gradient.device))


def _gradients(ctx: Any, d_loss: Tensor | None, d_lse: Tensor | None) -> list[Tensor | None]:
    """Of factor and the leaves."""
    *tensors, target, factor, lse, losses, slopes, lse_slopes = ctx.saved_tensors
    d_factor = d_row = None
    if ctx.needs_input_grad[4]:
        d_factor = torch.zeros_like(factor) if d_loss is None else losses * d_loss
    if slopes is not None:
        d_row = torch.zeros_like(slopes) if d_loss is None else slopes * (factor * d_loss)
        d_row = d_row if d_lse is None else d_row + lse_slopes * d_lse
    if not any(ctx.request.need):
        return [d_factor, None, None, None, None, d_row]
    ready, ctx.gradients = ctx.gradients, None
    if ready is not None and d_loss is not None and d_lse is None:
        made = [None if g is None else _scaled(g, d_loss) for g in ready]
    else:
        upstream = torch.zeros_like(factor) if d_loss is None else factor * d_loss
        made = operator.backward(
            ctx.request, ctx.vocabulary, Leaves(*tensors), target, lse, upstream, d_lse
        )
    return [d_factor, *made, d_row]
