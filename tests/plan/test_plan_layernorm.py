"""LayerNorm links: statistics that keep their digits when the mean is large."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from plan_oracle import Tensors, for_run, random_inputs
from plan_samples import BACKWARD, LAYER_NORM, applied, fused, layer_norm_link
from torch import Tensor

from codetta.language import columns, rowmean, rowsum
from codetta.language.values import Node, Value
from codetta.plan import Plan, PlanBuilder, run, schedule
from codetta.plan.rebuild import rewrite
from codetta.plan.rules import layernorm_commutes

D, N, M, EPS = 96, 64, 40, 1e-5
PLAN = layer_norm_link(D, N)
PARTS = fused(PLAN, forward=LAYER_NORM, backward=BACKWARD)
#: LayerNorm as it would be with sums of x and x² for statistics.
Change = Callable[[PlanBuilder, Node, list[Value]], Value | None]


def test_the_forward_is_one_gemm_with_a_rank_one_correction() -> None:
    """z = r ⊙ (x W'ᵀ − μ ⊙ s) + t + b: nothing between the GEMM that makes x and its consumer."""
    found = schedule(PARTS.forward)
    assert Counter(k.kind for k in found.kernels) == {"gemm": 2, "prepare": 3, "finalize": 1}
    assert "z = (acc - " in str(found)


def test_the_backward_needs_no_pass_over_x_of_its_own() -> None:
    found = schedule(PARTS.backward)
    kinds = Counter(k.kind for k in found.kernels if k.kind != "view")
    assert kinds == {"gemm": 4, "prepare": 2, "pointwise": 1, "finalize": 3}
    (pointwise,) = (k for k in found.kernels if k.kind == "pointwise")
    read = {found.plan.nodes[r].attr("name") for r in pointwise.reads if r in operands(found.plan)}
    assert "x" not in read


def operands(plan: Plan) -> set[int]:
    return {i for i, n in enumerate(plan.nodes) if n.op == "operand"}


def inputs_with_mean(ratio: float, dtype: torch.dtype) -> Tensors:
    """x with mean ``ratio`` times its standard deviation, exactly as stored (y is zero)."""
    inputs = random_inputs(PLAN, M, dtype=dtype)
    inputs["x0"] = (random_inputs(PLAN, M, seed=3)["x0"] + ratio).to(dtype)
    inputs["y"] = torch.zeros_like(inputs["y"])
    return inputs


def torch_link(x0: Tensor, wa: Tensor, y: Tensor, g: Tensor, beta: Tensor, w: Tensor,
               bias: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    x = y @ wa.T + x0
    return x, F.linear(F.layer_norm(x, (D,), g, beta, EPS), w, bias)


def torch_results(inputs: Tensors, cotangents: Tensors, dtype: torch.dtype) -> Tensors:
    leaves = {n: t.to(dtype).requires_grad_() for n, t in inputs.items()}
    x, z = torch_link(**leaves)
    seeds = [cotangents[n].to(dtype) for n in ("d_x", "d_z")]
    grads = torch.autograd.grad([x, z], list(leaves.values()), seeds)
    return {"x": x, "z": z} | {f"d_{n}": g for n, g in zip(leaves, grads, strict=True)}


def addends(inputs: Tensors, cotangents: Tensors) -> Tensors:
    """Sum of the absolute addends of each result's last expression, in fp64.

    z = r (x W'ᵀ − μ s) + t + b           dx = dres + (dz' W) γ − c0 − (x − μ) c1
    dW = (dz'ᵀ x − v) γ + db β            dγ = Σ (dz'ᵀ x − v) W,  dβ = Σ db W
    """
    i = {n: t.double() for n, t in inputs.items()}
    x, w, g = i["x0"], i["w"], i["g"]
    r = (x.var(1, unbiased=False, keepdim=True) + EPS).rsqrt()
    mean, dz = x.mean(1, keepdim=True), cotangents["d_z"].double()
    scaled = w * g
    shift = (mean * r) * scaled.sum(1)
    z = (r * (x @ scaled.T)).abs() + shift.abs() + (w @ i["beta"]).abs() + i["bias"].abs()
    dn = r * (dz @ scaled)
    hat = (x - mean) * r
    dx = cotangents["d_x"].double().abs() + dn.abs() + dn.mean(1, keepdim=True).abs()
    dx = dx + (hat * (dn * hat).mean(1, keepdim=True)).abs()
    product, v = (r * dz).T @ x, (r * mean * dz).sum(0)[:, None]
    wide = product.abs() + v.abs()
    dw = wide * g.abs() + (dz.sum(0)[:, None] * i["beta"]).abs()
    return {
        "z": z, "d_x0": dx, "d_w": dw, "d_g": (wide * w.abs()).sum(0),
        "d_beta": (dz.sum(0)[:, None] * w).abs().sum(0),
    }  # fmt: skip


def plan_results(inputs: Tensors, cotangents: Tensors, change: Change | None = None) -> Tensors:
    plans = PARTS.forward, PARTS.backward
    if change is not None:
        parts = fused(rewrite(PLAN, change), forward=LAYER_NORM, backward=BACKWARD)
        plans = parts.forward, parts.backward
    forward = run(schedule(plans[0]), for_run(inputs, plans[0]))
    known = inputs | forward | cotangents
    return forward | run(schedule(plans[1]), for_run(known, plans[1]))


def within_budget(
    ratio: float, dtype: torch.dtype, change: Change | None = None
) -> dict[str, bool]:
    """‖ours − ref64‖ ≤ 2 ‖torch − ref64‖ + 2 eps ‖addends‖, by result."""
    inputs = inputs_with_mean(ratio, dtype)
    generator = torch.Generator().manual_seed(5)
    cotangents = {
        n: torch.randn(M, c, generator=generator).to(dtype) for n, c in (("d_x", D), ("d_z", N))
    }
    exact = torch_results(inputs, cotangents, torch.float64)
    theirs = torch_results(inputs, cotangents, dtype)
    ours = plan_results(inputs, cotangents, change)
    eps = torch.finfo(dtype).eps
    return {
        n: bool(
            (ours[n].double() - exact[n]).norm()
            <= 2 * (theirs[n].double() - exact[n]).norm() + 2 * eps * sizes.norm()
        )
        for n, sizes in addends(inputs, cotangents).items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ratio", [0, 10, 100, 1000])
def test_a_large_mean_stays_within_the_error_budget(ratio: float, dtype: torch.dtype) -> None:
    found = within_budget(ratio, dtype)
    assert all(found.values()), found


def sums_of_squares(b: PlanBuilder, node: Node, args: list[Value]) -> Value | None:
    """variance = mean(x²) − mean(x)²."""
    if node.op != "rowvar":
        return None
    (x,) = args
    mean = rowmean(x)
    return rowsum(x * x) / columns(x) - mean * mean


def test_sums_of_squares_would_not() -> None:
    found = within_budget(1000, torch.float32, sums_of_squares)
    assert not found["z"] and not found["d_x0"]


def test_the_shift_is_summed_from_the_folded_weight_as_it_is_stored() -> None:
    """s reads the rounded W ⊙ γ, so that what is subtracted is what was added."""
    found = schedule(applied(PLAN, (layernorm_commutes,)))
    (gemm,) = (
        k for k in found.kernels if k.kind == "gemm" and k.reads[1] not in operands(found.plan)
    )
    folded = gemm.reads[1]
    assert any(k.kind == "prepare" and k.reads == (folded,) for k in found.kernels)
