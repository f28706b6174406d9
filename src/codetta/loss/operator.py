"""``codetta::linear_cross_entropy`` and its backward: the loss head as operators.

Compiled graphs hold these two calls, whose arguments are tensors and a text; the schedule is chosen
when they run, from the sizes that they then have. Eager calls go to the passes directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from codetta.loss import engine
from codetta.loss.head import Head, Leaves
from codetta.loss.options import Request
from codetta.loss.plan import LossPlan, Problem, choose
from codetta.loss.shifted import applies
from codetta.loss.vocabulary import WHOLE, Vocabulary
from codetta.ops import compute_dtype
from codetta.ops.inductor import register_fake
from codetta.plan.operator import is_traced

_LIBRARY = torch.library.Library("codetta", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
#: :class:`codetta.loss.head.Leaves` in a schema.
_LEAVES = "Tensor x, Tensor weight, Tensor? bias, Tensor? column_scale, Tensor? row_scale"
_LIBRARY.define(
    f"linear_cross_entropy({_LEAVES}, Tensor target, Tensor valid, Tensor factor, str request) "
    "-> Tensor[]",
    tags=_TAGS,
)
_LIBRARY.define(
    f"linear_cross_entropy_forward({_LEAVES}, Tensor target, Tensor factor, str request) "
    "-> Tensor[]",
    tags=_TAGS,
)
_LIBRARY.define(
    f"linear_cross_entropy_backward({_LEAVES}, Tensor target, Tensor lse, Tensor factor, "
    "Tensor? lse_gradient, str request) -> Tensor[]",
    tags=_TAGS,
)


class Made(NamedTuple):
    """What the forward pass leaves; see :class:`codetta.loss.engine.Forward`."""

    losses: Tensor
    lse: Tensor
    hit: Tensor | None
    logits: Tensor | None
    slopes: tuple[Tensor, Tensor] | None
    gradients: list[Tensor | None] | None


def forward(
    request: Request,
    vocabulary: Vocabulary,
    leaves: Leaves,
    target: Tensor,
    factor: Tensor,
) -> Made:
    """The forward pass of canonical tensors, below autograd."""
    if is_traced(leaves.x):
        assert vocabulary is WHOLE
        return _unpacked(request, _FORWARD(*leaves, target, factor, request.text))
    head = Head(leaves, target, request.options, vocabulary)
    made = engine.forward(head, factor, _plan(request, vocabulary, leaves), request.need)
    return Made(made.losses, made.lse, made.hit, made.logits, made.slopes, made.gradients)


def backward(
    request: Request,
    vocabulary: Vocabulary,
    leaves: Leaves,
    target: Tensor,
    lse: Tensor,
    factor: Tensor,
    lse_gradient: Tensor | None,
) -> list[Tensor | None]:
    """Gradients of x, weight, bias and column scale from logits that are computed again."""
    if is_traced(leaves.x):
        assert vocabulary is WHOLE
        arguments = (*leaves, target, lse, factor, lse_gradient, request.text)
        flat = iter(_BACKWARD(*arguments))
        return [next(flat) if wanted else None for wanted in request.need]
    head = Head(leaves, target, request.options, vocabulary)
    plan = _plan(replace(request, schedule="recompute"), vocabulary, leaves)
    return engine.backward(head, lse, factor, lse_gradient, plan, request.need)


def settled(request: Request, vocabulary: Vocabulary, leaves: Leaves) -> Request:
    """The request with a schedule: what a graph holds must not depend on sizes it will have."""
    return replace(request, schedule=_plan(request, vocabulary, leaves).schedule)


def _plan(request: Request, vocabulary: Vocabulary, leaves: Leaves) -> LossPlan:
    m, d, v = (_hint(size) for size in (*leaves.x.shape, leaves.weight.shape[0]))
    dx, dw, db, d_column = request.need
    problem = Problem(
        m, d, vocabulary.largest(v), leaves.x.dtype, request.scalar, dx or d_column, dw, db,
        leaves.column_scale is not None,
        applies(request.options, request.need, leaves.x.dtype, vocabulary is WHOLE,
                leaves.column_scale is not None),
        request.wide_sums,
    )  # fmt: skip
    return choose(problem, schedule=request.schedule, chunk=request.chunk, limit=request.limit)


def _hint(size: Any) -> int:
    """A size; of a symbol, the one it was traced with, without holding the graph to it."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 4096 if hint is None else int(hint)


def _flat(made: Made) -> list[Tensor]:
    slopes, gradients = made.slopes or (), made.gradients or ()
    parts = (made.losses, made.lse, made.hit, made.logits, *slopes, *gradients)
    return [x for x in parts if x is not None]


def _unpacked(request: Request, flat: Sequence[Tensor]) -> Made:
    parts = iter(flat)
    losses, lse = next(parts), next(parts)
    hit = next(parts) if request.options.accuracy else None
    logits = next(parts) if request.options.keep_logits else None
    slopes = (next(parts), next(parts)) if request.options.slopes else None
    formed = request.schedule == "forward" and any(request.need)
    gradients = [next(parts) if wanted else None for wanted in request.need] if formed else None
    return Made(losses, lse, hit, logits, slopes, gradients)


# --------------------------------------------------------------------------------- kernels
def _forward_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    column_scale: Tensor | None,
    row_scale: Tensor | None,
    target: Tensor,
    factor: Tensor,
    request: str,
) -> list[Tensor]:
    leaves = Leaves(x, weight, bias, column_scale, row_scale)
    with torch.autocast(x.device.type, enabled=False):
        return _flat(forward(Request.parse(request), WHOLE, leaves, target, factor))


def _backward_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    column_scale: Tensor | None,
    row_scale: Tensor | None,
    target: Tensor,
    lse: Tensor,
    factor: Tensor,
    lse_gradient: Tensor | None,
    request: str,
) -> list[Tensor]:
    wanted, leaves = Request.parse(request), Leaves(x, weight, bias, column_scale, row_scale)
    with torch.autocast(x.device.type, enabled=False):
        made = backward(wanted, WHOLE, leaves, target, lse, factor, lse_gradient)
    return [g for g in made if g is not None]


def _kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    column_scale: Tensor | None,
    row_scale: Tensor | None,
    target: Tensor,
    valid: Tensor,
    factor: Tensor,
    request: str,
) -> list[Tensor]:
    """With autograd and without."""
    from codetta.loss.function import apply

    leaves = Leaves(x, weight, bias, column_scale, row_scale)
    results = apply(Request.parse(request), WHOLE, target, valid, leaves, factor)
    return [r for r in results if r is not None]


@register_fake("linear_cross_entropy_forward", _LIBRARY)
def _forward_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    column_scale: Tensor | None,
    row_scale: Tensor | None,
    target: Tensor,
    factor: Tensor,
    request: str,
) -> list[Tensor]:
    wanted = Request.parse(request)
    m, v = x.shape[0], weight.shape[0]
    wide = compute_dtype(x.dtype, ())
    made = [x.new_empty(m, dtype=wide), x.new_empty(m, dtype=wide)]
    made += [x.new_empty(m, dtype=torch.bool)] if wanted.options.accuracy else []
    made += [x.new_empty(m, v)] if wanted.options.keep_logits else []
    made += [x.new_empty(m, dtype=wide) for _ in range(2 * wanted.options.slopes)]
    if wanted.schedule == "forward":
        made += _gradients_fake(wanted, Leaves(x, weight, bias, column_scale, row_scale))
    return made


@register_fake("linear_cross_entropy_backward", _LIBRARY)
def _backward_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    column_scale: Tensor | None,
    row_scale: Tensor | None,
    target: Tensor,
    lse: Tensor,
    factor: Tensor,
    lse_gradient: Tensor | None,
    request: str,
) -> list[Tensor]:
    leaves = Leaves(x, weight, bias, column_scale, row_scale)
    return _gradients_fake(Request.parse(request), leaves)


def _gradients_fake(request: Request, leaves: Leaves) -> list[Tensor]:
    tensors = zip(leaves[:4], request.need, strict=True)
    return [t.new_empty(t.shape) for t, wanted in tensors if wanted and t is not None]


_LIBRARY.impl("linear_cross_entropy", _kernel, "CompositeImplicitAutograd")
_LIBRARY.impl("linear_cross_entropy_forward", _forward_kernel, "CompositeExplicitAutograd")
_LIBRARY.impl("linear_cross_entropy_backward", _backward_kernel, "CompositeExplicitAutograd")

WITH_AUTOGRAD: Any = torch.ops.codetta.linear_cross_entropy.default
_FORWARD: Any = torch.ops.codetta.linear_cross_entropy_forward.default
_BACKWARD: Any = torch.ops.codetta.linear_cross_entropy_backward.default
