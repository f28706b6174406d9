"""Weights packed and folded by one generated kernel equal the Plan, operation by operation."""

from __future__ import annotations

import pytest
import torch
from triton_runner import DEVICE

from codetta.backends.cuda.triton_prepare import _packing, fixed, prepare_weights
from codetta.language import rowsum
from codetta.plan import PlanBuilder, evaluate

HEADS = {"head_dim": 4, "rotary_dim": 4, "heads": 2, "inverse": False}


def stacked(p: PlanBuilder):
    q, k, v = (p.weight(name, rows, 24) for name, rows in (("q", 8), ("k", 4), ("v", 4)))
    return p.emit("stack_rows", q, k, v) * p.row("gamma", 24)


def interleaved(p: PlanBuilder):
    gate, up = p.weight("gate", 10, 24), p.weight("up", 10, 24)
    return p.row("gamma", 24) * p.emit("interleave_rows", gate, up)


def permuted(p: PlanBuilder):
    both = p.emit("stack_rows", p.weight("q", 8, 24), p.weight("v", 4, 24))
    return p.emit("permute_rows", both, **HEADS) * (p.row("gamma", 24) + 1.0)


def sliced(p: PlanBuilder):
    both = p.emit("stack_rows", p.weight("q", 8, 24), p.weight("v", 4, 24))
    return p.emit("slice_rows", both, start=3, stop=11)


def folded(p: PlanBuilder):
    return p.weight("w", 10, 24) * p.row("gamma", 24)


def alone(p: PlanBuilder):
    return p.weight("w", 10, 24)


def summed(p: PlanBuilder):
    return rowsum(p.weight("w", 10, 24) * p.row("gamma", 24))


#: Weights as they come, with contiguous columns, or as every other row of a larger storage.
LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.t().contiguous().t(),
    "every other row": lambda x: torch.stack((x, torch.full_like(x, torch.nan)), 1)[:, 0],
}


def prepared(form, dtype=torch.bfloat16, layout="rows"):
    """The Plan, its weights, and what they are prepared to by evaluation in fp32."""
    p = PlanBuilder(form.__name__)
    p.output("w_prepared", form(p))
    plan = p.build()
    g = torch.Generator().manual_seed(0)
    weights = []
    for i in plan.inputs:
        rows, cols = int(i.type.rows) if i.type.has_rows else 1, int(i.type.cols)
        x = torch.randn(rows, cols, generator=g).to(dtype).to(DEVICE)
        weights.append(LAYOUTS[layout](x) if i.type.has_rows else x[0])
    names = [i.name for i in plan.inputs]
    (expected,) = evaluate(
        plan, compute=torch.float32, **dict(zip(names, weights, strict=True))
    ).values()
    return plan, weights, expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", [stacked, interleaved, permuted, sliced, folded, alone])
def test_one_kernel_packs_and_folds(form, layout):
    plan, weights, expected = prepared(form, layout=layout)
    assert _packing(plan.text) is not None
    got = prepare_weights(plan, weights)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, expected.to(torch.bfloat16))
    other = [LAYOUTS[layout](x.roll(1, 0)) if x.ndim > 1 else x.roll(1) for x in weights]
    rolled = prepare_weights(plan, other)
    assert not torch.equal(rolled, got)
    run = fixed(plan, weights)
    assert (run is None) == (DEVICE == "cpu")  # the interpreter compiles nothing
    if run is not None:
        assert torch.equal(run(weights), got) and torch.equal(run(other), rolled)


def test_other_plans_are_evaluated():
    plan, weights, expected = prepared(summed)
    assert _packing(plan.text) is None
    got = prepare_weights(plan, weights)
    assert got.shape == (10, 1) and torch.equal(got[:, 0], expected)
    assert fixed(plan, weights) is None


def test_a_norm_weight_in_fp32_is_not_rounded_first():
    plan, weights, _ = prepared(folded)
    gamma = weights[1].float() * 1.001
    got = prepare_weights(plan, [weights[0], gamma])
    assert torch.equal(got, (weights[0].float() * gamma).to(torch.bfloat16))
