"""A Plan as a differentiable PyTorch function.

``apply_plan`` runs the forward schedule, keeps what the backward schedule reads and nothing else,
and runs the backward schedule in one autograd node. Which inputs need gradients decides which
backward is built: a frozen weight has no wgrad GEMM in its Plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from codetta.errors import DoubleBackward
from codetta.language.types import Kind
from codetta.nn.block import BACKWARD, Compiled, Rules, compiled
from codetta.plan import Plan, Schedule, run


def apply_plan(plan: Plan, inputs: Mapping[str, Any], rules: Rules = BACKWARD) -> dict[str, Tensor]:
    """Outputs of an optimized Plan by name, differentiable with respect to its tensor inputs.

    Args:
        plan: inputs and outputs as in :func:`codetta.plan.run`.
        inputs: tensors by name; a Rotary input is (table, positions), without gradient.
        rules: the algebra of forward and backward together.
    """
    names = [i.name for i in plan.inputs if i.type.kind is not Kind.ROTARY]
    constants = {i.name: inputs[i.name] for i in plan.inputs if i.type.kind is Kind.ROTARY}
    wrt = tuple(n for n in names if torch.is_grad_enabled() and inputs[n].requires_grad)
    outputs = tuple(o.name for o in plan.outputs)
    parts = compiled(plan, wrt, outputs, rules)
    if parts.backward is None:
        return _run(parts.forward, inputs)
    found = _PlanFunction.apply(plan, parts, tuple(names), constants, *(inputs[n] for n in names))
    return dict(zip(outputs, found, strict=True))


class _PlanFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        parts: Compiled,
        names: tuple[str, ...],
        constants: dict[str, Any],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        assert parts.backward is not None
        given = dict(zip(names, tensors, strict=True)) | constants
        found = _run(parts.forward, given)
        available = given | found
        needed = [
            i.name
            for i in parts.backward.plan.inputs
            if i.name in available and i.name not in constants
        ]
        ctx.save_for_backward(*(available[n] for n in needed))
        ctx.kept = tuple(needed)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.names, ctx.constants, ctx.backward = plan, names, constants, parts.backward
        ctx.like = [(t.shape, t.dtype) for t in tensors]
        return tuple(found[o.name] for o in plan.outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        outputs = [o.name for o in ctx.plan.outputs]
        arrived = {n: d for n, d in zip(outputs, cotangents, strict=True) if d is not None}
        gradients: dict[str, Tensor] = {}
        if arrived:
            with torch.no_grad():
                gradients = _backward(ctx, arrived)
        by_name = (gradients.get(f"d_{n}") for n in ctx.names)
        result = tuple(
            None if g is None else g.reshape(shape).to(dtype)
            for g, (shape, dtype) in zip(by_name, ctx.like, strict=True)
        )
        if torch.is_grad_enabled():  # create_graph=True
            result = _once(ctx.plan.name, result)
        return None, None, None, None, *result


def _backward(ctx: Any, arrived: Mapping[str, Tensor]) -> dict[str, Tensor]:
    kept = dict(zip(ctx.kept, ctx.saved_tensors, strict=True)) | ctx.constants
    if len(arrived) < len(ctx.plan.outputs):
        arrived = _with_zeros(ctx.plan, arrived)
    given = kept | {f"d_{n}": d for n, d in arrived.items()}
    return _run(ctx.backward, given)


def _run(schedule: Schedule, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Below autograd and its view tracking, which would forbid changing an output in place."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return run(schedule, {i.name: given[i.name] for i in schedule.plan.inputs})


def _with_zeros(plan: Plan, arrived: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A cotangent for every output: an output that reached no loss has gradient zero."""
    sample = next(iter(arrived.values()))
    tokens = sample.shape[0]
    full = dict(arrived)
    for out in plan.outputs:
        if out.name not in full:
            type_ = plan.nodes[out.node].type
            shape = (tokens, int(type_.cols)) if type_.kind is Kind.TILE else (tokens,)
            full[out.name] = sample.new_zeros(shape)
    return full


def _once(name: str, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients whose own differentiation is a named error."""
    tensors = [g for g in gradients if g is not None]
    guarded = iter(_Once.apply(name, *(t.detach().requires_grad_() for t in tensors)))
    return tuple(None if g is None else next(guarded) for g in gradients)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> None:
        raise DoubleBackward(program=ctx.name)
