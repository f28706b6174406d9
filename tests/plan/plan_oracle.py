"""Inputs for Plans and the one comparison that all their tests share: fp64, 1e-12."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from codetta.language.types import Kind, Type
from codetta.plan import Plan, Schedule, Split, evaluate, run, schedule

Tensors = dict[str, Tensor]


def shape_of(type_: Type, m: int) -> tuple[int, ...]:
    rows = (m if type_.rows == "M" else int(type_.rows),) if type_.has_rows else ()
    return rows + ((int(type_.cols),) if type_.has_cols else ())


def rotary_dim(plan: Plan) -> int:
    return max((int(n.attr("rotary_dim")) for n in plan.nodes if n.op == "rotate"), default=2)


def random_inputs(plan: Plan, m: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensors:
    """Normal inputs, weights scaled by K^(-1/2) so that values stay near 1; rotary [cos | sin]."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for i in plan.inputs:
        if i.type.kind is Kind.ROTARY:
            angle = torch.randn(m, rotary_dim(plan) // 2, generator=generator, dtype=torch.float64)
            found[i.name] = torch.cat((angle.cos(), angle.sin()), 1)
            continue
        shape = shape_of(i.type, m)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        weight = i.role == "parameter" and i.type.kind is Kind.TILE
        found[i.name] = (x / max(1, shape[1]) ** 0.5 if weight else x).to(dtype)
    return found


def for_run(inputs: Mapping[str, Tensor], plan: Plan) -> dict[str, Any]:
    """Inputs as ``run`` takes them: of this plan only, rotary as (table, positions)."""
    found: dict[str, Any] = {}
    for i in plan.inputs:
        x = inputs[i.name]
        found[i.name] = (x, torch.arange(len(x))) if i.type.kind is Kind.ROTARY else x
    return found


def error(ours: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Largest error over all outputs, against the largest of them (at least 1)."""
    assert set(ours) == set(exact)
    scale = max([1.0, *(float(x.abs().max()) for x in exact.values() if x.numel())])
    assert all(ours[n].shape == exact[n].shape for n in exact)
    errors = [float((ours[n] - exact[n]).abs().max()) for n in exact if exact[n].numel()]
    return max((float("inf") if e != e else e for e in errors), default=0.0) / scale


def same(plan: Plan, other: Plan, m: int = 5, seed: int = 0, *, tolerance: float = 1e-12) -> bool:
    """Both Plans compute the same outputs. The first one's inputs are those of both."""
    inputs = random_inputs(plan, m, seed)
    ours = evaluate(other, **{i.name: inputs[i.name] for i in other.inputs})
    return error(ours, evaluate(plan, **inputs)) <= tolerance


def cotangents_of(outputs: Mapping[str, Tensor], seed: int = 1) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"d_{n}": torch.randn(x.shape, generator=generator, dtype=x.dtype)
        for n, x in outputs.items()
    }


def autograd(plan: Plan, inputs: Tensors, wrt: list[str], cotangents: Tensors) -> Tensors:
    """Gradients d_<name> of ``evaluate`` by PyTorch; zero where nothing depends on the input."""
    leaves = {n: inputs[n].clone().requires_grad_() for n in wrt}
    outputs = evaluate(plan, **(inputs | leaves))
    used = {n: x for n, x in outputs.items() if x.requires_grad and f"d_{n}" in cotangents}
    if not used:
        return {f"d_{n}": torch.zeros_like(leaves[n]) for n in wrt}
    grads = torch.autograd.grad(
        list(used.values()), list(leaves.values()), [cotangents[f"d_{n}"] for n in used],
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    return {f"d_{n}": g for n, g in zip(wrt, grads, strict=True)}


def run_split(
    parts: Split, inputs: Tensors, cotangents: Tensors,
    scheduled: Callable[[Plan], Schedule] = schedule,
) -> tuple[Tensors, Tensors]:  # fmt: skip
    """Outputs and gradients from the two schedules, values handed over as a runtime would."""
    forward = run(scheduled(parts.forward), for_run(inputs, parts.forward))
    backward = scheduled(parts.backward)
    known = inputs | forward | cotangents
    gradients = run(backward, for_run(known, parts.backward)) if parts.backward.outputs else {}
    extra = {n for n in forward if n.startswith("saved_")}
    return {n: x for n, x in forward.items() if n not in extra}, gradients
