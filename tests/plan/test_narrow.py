"""Plans whose parameters and residual stream are fp32 and whose products are narrower."""

from __future__ import annotations

import pytest
import torch
from helpers.budget import within_budget

from codetta.language import columns, round_to, rowsum, rsqrt, silu
from codetta.nn.block import compiled, joint, optimized
from codetta.nn.function import apply_plan
from codetta.plan import Plan, PlanBuilder, evaluate
from codetta.plan.operations import matrix
from codetta.plan.plan import ACTIVATION, PARAMETER
from codetta.plan.rules import narrowed

D, F, M = 64, 96, 40


@pytest.fixture(scope="module")
def plan():
    p = PlanBuilder("layer")
    o, x = p.tile("o", "M", D), p.input("x", matrix("M", D), ACTIVATION, "bf16")

    def weight(name, n, k):
        return p.input(name, matrix(n, k), PARAMETER, "bf16")

    x = round_to(p.mm(o, weight("wo", D, D).t()) + x, "accumulator")
    normed = x * rsqrt(rowsum(x * x) / columns(x) + 1e-6) * p.row("norm", D)
    gate = p.mm(normed, weight("wg", F, D).t())
    hidden = silu(gate) * p.mm(normed, weight("wu", F, D).t())
    p.output("x", round_to(p.mm(hidden, weight("wd", D, F).t()) + x, "accumulator"))
    return p.build()


def eager(given, narrow):
    def linear(x, w):
        return narrow(x) @ narrow(w).t()

    x = linear(given["o"], given["wo"]) + given["x"]
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * given["norm"]
    hidden = torch.nn.functional.silu(linear(normed, given["wg"])) * linear(normed, given["wu"])
    return linear(hidden, given["wd"]) + x


def values(plan, dtype=torch.float32):
    made = {}
    for i in plan.inputs:
        rows = M if i.type.rows == "M" else int(i.type.rows)
        shape = (rows, int(i.type.cols)) if i.type.has_rows else (int(i.type.cols),)
        scale = 0.1 if i.role == PARAMETER and i.type.has_rows else 1.0
        made[i.name] = (scale * torch.randn(shape)).to(dtype if i.name != "o" else torch.bfloat16)
    return {k: v.requires_grad_() for k, v in made.items()}


def run(function, given, d):
    y = function(given)
    y.backward(d.to(y.dtype))
    return {"y": y.detach(), **{k: v.grad for k, v in given.items()}}


def copied(given, dtype):
    return {k: v.detach().to(dtype or v.dtype).requires_grad_() for k, v in given.items()}


def test_values_and_gradients_are_within_the_budget(plan, backend):
    torch.manual_seed(0)
    made = optimized(plan)
    given, d = values(made), torch.randn(M, D)
    exact = run(lambda g: eager(g, lambda t: t), copied(given, torch.float64), d)
    theirs = run(lambda g: eager(g, lambda t: t.bfloat16()), copied(given, None), d)
    ours = run(lambda g: apply_plan(made, g)["x"], copied(given, None), d)
    assert ours["y"].dtype is torch.float32
    for name, e in exact.items():
        assert ours[name].dtype is theirs[name].dtype, name
        # Products are in bf16, whatever the dtype of what is made of them.
        eps = torch.finfo(torch.bfloat16).eps
        error = (ours[name].double() - e).norm()
        assert error <= 2 * (theirs[name].double() - e).norm() + eps * 1e-2 * e.norm(), name
    within_budget("y", ours["y"], exact["y"], theirs["y"])


def test_the_stream_is_stored_in_fp32_and_once_more_for_products(plan):
    made = optimized(plan)
    parts = compiled(made, tuple(i.name for i in made.inputs), ("x",))
    first = next(k for k in parts.forward.kernels if k.kind == "gemm")
    assert [o.dtype for o in first.program.outputs] == ["accumulator", "bf16", "accumulator"]
    assert parts.backward is not None
    stored = {o.name: parts.backward.plan.storage(o.node) for o in parts.backward.plan.outputs}
    assert stored == {
        "d_o": "operand", "d_norm": "operand",
        **dict.fromkeys(("d_x", "d_wo", "d_wg", "d_wu", "d_wd"), "accumulator"),
    }  # fmt: skip


def test_no_kernel_only_narrows_an_activation(plan):
    """Who makes a value that products read stores it in their dtype, too; a gradient comes in."""
    made = optimized(plan)
    parts = compiled(made, tuple(i.name for i in made.inputs), ("x",))
    assert parts.backward is not None
    assert [k.kind for k in parts.forward.kernels if k.kind == "pointwise"] == []
    (alone,) = (k for k in parts.backward.kernels if k.kind == "pointwise")
    assert [parts.backward.plan.nodes[r].attr("name") for r in alone.reads] == ["d_x"]


def test_the_text_parses_back(plan):
    assert Plan.parse(plan.text) == plan
    again = Plan.parse(narrowed(plan).text)
    assert again == narrowed(plan)
    assert again.narrow == "bf16"


def test_narrowing_changes_nothing_but_the_rounding(plan):
    """With roundings taken out, the joint Plan is that of the same Plan in one dtype."""
    torch.manual_seed(0)
    made = optimized(plan)
    wanted = tuple(i.name for i in made.inputs)
    whole = joint(made, wanted, ("x",))
    given = {k: v.detach().double() for k, v in values(made).items()}
    d = torch.randn(M, D).double()
    exact = run(lambda g: eager(g, lambda t: t), copied(given, torch.float64), d)
    found = evaluate(_unrounded(whole), **given, d_x=d)
    for name in wanted:
        torch.testing.assert_close(found[f"d_{name}"], exact[name], rtol=1e-11, atol=1e-11)


def _unrounded(plan):
    from codetta.language.values import Value
    from codetta.plan.rebuild import rewrite

    return rewrite(
        plan, lambda b, node, args: Value(b, args[0].id) if node.op == "round_to" else None
    )
