"""Evaluation of a Plan, one operation at a time: its meaning, and the oracle of everything else.

In fp64 nothing is rounded, so the algebra's rules, differentiation and schedules must all agree
with this to 1e-12; that is how they are tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from codetta.errors import PlanInput
from codetta.language.meaning import Context
from codetta.language.primitives import COL_REDUCTIONS, MEANING, REDUCTION, REDUCTIONS
from codetta.language.types import Kind, Type
from codetta.language.values import Node, attrs_of
from codetta.plan.operations import OPERATIONS
from codetta.plan.plan import Plan


def evaluate(plan: Plan, *, compute: torch.dtype | None = None, **inputs: Any) -> dict[str, Tensor]:
    """Outputs of ``plan`` by name, computed operation by operation with PyTorch (differentiable).

    Args:
        plan: any Plan.
        compute: dtype of all arithmetic; by default fp32 or the widest input's.
        inputs: tensors by name: tiles (rows, cols), Cols (M,), Rows (cols,), Scalars numbers or
            tensors, Rotary (M, rotary_dim) as [cos | sin] of each token.

    Raises:
        PlanInput: a name is missing or unknown.
    """
    names = [i.name for i in plan.inputs]
    if set(names) != set(inputs):
        raise PlanInput(plan=plan.name, given=sorted(inputs), expected=names)
    tensors = {n: torch.as_tensor(x) for n, x in inputs.items()}
    dtype = compute or torch.float32
    if compute is None:
        for t in tensors.values():
            if t.is_floating_point():
                dtype = torch.promote_types(dtype, t.dtype)
    m = next(
        (tensors[i.name].shape[0] for i in plan.inputs if i.type.has_rows and i.type.rows == "M"), 1
    )
    device = next((t.device for t in tensors.values()), torch.device("cpu"))
    matrices = (t.dtype for t in tensors.values() if t.is_floating_point() and t.ndim == 2)
    operand = next(matrices, dtype)
    ctx = Context(m, 1, operand, dtype, device)
    values: list[Tensor] = []
    for node in plan.nodes:
        values.append(_value(ctx, node, values, tensors))
    return {o.name: _flat(values[o.node], plan.nodes[o.node].type, ctx) for o in plan.outputs}


def _value(ctx: Context, node: Node, values: list[Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
    args = [values[a] for a in node.args]
    if node.op == "operand":
        return canonical(inputs[node.attr("name")], node.type, ctx.compute)
    if node.op == "const":
        return torch.full((1, 1), node.attr("value"), dtype=ctx.compute, device=ctx.device)
    if node.op == "extent":
        n = ctx.m if node.attr("axis") == "m" else ctx.cols(node.attr("width"))
        return torch.full((1, 1), n, dtype=ctx.compute, device=ctx.device)
    if node.op in OPERATIONS:
        return OPERATIONS[node.op].meaning(ctx, attrs_of(node), *args)
    if node.op in REDUCTIONS:
        return _reduce(node.op, args)
    result: Tensor = MEANING[node.op](ctx, attrs_of(node), *args)
    return result


def canonical(x: Tensor, type_: Type, dtype: torch.dtype) -> Tensor:
    """Two-dimensional form: tiles as they are, (M, 1), (1, N), (1, 1)."""
    if type_.kind is Kind.INDEX:
        return x.reshape(-1, 1)
    x = x.to(dtype)
    if type_.kind in (Kind.TILE, Kind.ROTARY):
        return x
    if type_.kind is Kind.COL:
        return x.reshape(-1, 1)
    return x.reshape(1, -1)


def _reduce(op: str, args: list[Tensor]) -> Tensor:
    x, *extra = args
    rule = REDUCTION[op]
    if op == "totalsum":
        return x.sum().reshape(1, 1)
    if op in COL_REDUCTIONS:
        return rule.combine(*rule.partial(x.T[:, None, :], None))[None, :]
    extra = [e if op == "select" else e.expand_as(x)[:, None, :] for e in extra]
    return rule.combine(*rule.partial(x[:, None, :], None, *extra))[:, None]


def _flat(x: Tensor, type_: Type, ctx: Context) -> Tensor:
    rows = ctx.rows(type_.rows) if type_.has_rows else 1
    x = x.expand(rows, int(type_.cols) if type_.has_cols else 1)
    if type_.kind is Kind.TILE:
        return x
    return x.reshape(()) if type_.kind is Kind.SCALAR else x.reshape(-1)
