"""Schedules: the kernels of a layer, the invariants of every schedule, and their execution."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import given
from plan_mutants import mutants
from plan_oracle import (
    autograd,
    cotangents_of,
    error,
    for_run,
    random_inputs,
    run_split,
)
from plan_samples import (
    FORWARD,
    LAYER_NORM,
    Rule,
    applied,
    decoder_layer,
    fused,
    layer_norm_link,
    rms_norm,
    trainable,
)
from plan_strategies import TOKENS, examples, plans

from codetta.language import rotate, rowmean, rowsum, silu, unpack
from codetta.language.primitives import REDUCTIONS
from codetta.language.program import Program
from codetta.language.types import Kind
from codetta.plan import (
    OPAQUE,
    Opaque,
    Plan,
    PlanBuilder,
    Schedule,
    differentiate,
    evaluate,
    run,
    schedule,
    split,
)
from codetta.plan.rules import (
    r1_row_scale,
    r2_column_scale,
    r3_adjoint_row_sum,
    r4_wgrad_row_scale,
    r6_shared_operand,
    r9_orthogonal,
    read_stored,
)


def kinds(found: Schedule) -> Counter[str]:
    return Counter(k.kind for k in found.kernels if k.kind != "view")


def headings(found: Schedule) -> list[str]:
    """The first line of each memory-bound kernel in the listing."""
    lines = [x for x in str(found).splitlines()[1:] if not x.startswith(" ")]
    return [x for x in lines if not x.startswith(("gemm", "view"))]


# ------------------------------------------------------------------------------ what a layer is
def test_a_layer_is_four_gemms_forward_and_eight_backward() -> None:
    parts = fused(decoder_layer())
    assert kinds(schedule(parts.forward)) == {"gemm": 4, "finalize": 2, "prepare": 2}
    assert kinds(schedule(parts.backward)) == {
        "gemm": 8, "pointwise": 1, "finalize": 4, "prepare": 2,
    }  # fmt: skip


def test_the_memory_bound_kernels_of_a_layer_are_folds_finalizers_and_the_rotation() -> None:
    parts = fused(decoder_layer())
    assert headings(schedule(parts.forward)) == [
        "finalize -> saved_18 (M, 1)", "prepare -> w10 (24, 8)",
        "finalize -> saved_40 (M, 1)", "prepare -> w34 (32, 8)",
    ]  # fmt: skip
    assert [x.split(" -> ")[0] for x in headings(schedule(parts.backward))] == [
        "pointwise", "finalize", "prepare", "finalize", "finalize", "prepare", "finalize",
    ]  # fmt: skip


def test_biases_of_qkv_add_a_pack_and_one_sum() -> None:
    parts = fused(decoder_layer(bias=True))
    assert kinds(schedule(parts.forward)) == {"gemm": 4, "finalize": 2, "prepare": 3}
    assert kinds(schedule(parts.backward)) == {
        "gemm": 8, "pointwise": 1, "finalize": 5, "prepare": 3,
    }  # fmt: skip


NAIVE: tuple[Rule, ...] = (
    r1_row_scale, r2_column_scale, r3_adjoint_row_sum, r4_wgrad_row_scale, r2_column_scale,
    r4_wgrad_row_scale, read_stored, r9_orthogonal,
)  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
def test_the_algebra_may_come_before_or_after_differentiation(bias: bool) -> None:
    """A captured graph is differentiated as it stands; R3 finds the same kernels there."""
    plan = decoder_layer(bias=bias)
    merged = r6_shared_operand(plan)
    late = split(applied(differentiate(merged, trainable(plan)), NAIVE))
    early = fused(plan)
    assert kinds(schedule(late.forward)) == kinds(schedule(early.forward))
    assert kinds(schedule(late.backward)) == kinds(schedule(early.backward))
    assert len(late.saved) == len(early.saved)


def test_stacked_gate_and_up_are_scheduled_like_interleaved_ones() -> None:
    """Only their gradients differ: two blocks of rows instead of every other row."""
    stacked: tuple[Rule, ...] = (partial(r6_shared_operand, pairs="halves"), *FORWARD[1:])
    plan = decoder_layer()
    parts, usual = fused(plan, forward=stacked), fused(plan)
    assert kinds(schedule(parts.forward)) == kinds(schedule(usual.forward))
    assert kinds(schedule(parts.backward)) == kinds(schedule(usual.backward))
    inputs = random_inputs(plan, 5)
    exact = evaluate(plan, **inputs)
    cotangents = cotangents_of(exact)
    outputs, gradients = run_split(parts, inputs, cotangents)
    assert error(outputs, exact) <= 1e-12
    assert error(gradients, autograd(plan, inputs, trainable(plan), cotangents)) <= 1e-12


def test_a_frozen_layer_runs_its_dgrads_only() -> None:
    parts = fused(decoder_layer(), wrt=["o", "x0"])
    assert kinds(schedule(parts.backward))["gemm"] == 4


def test_a_norm_before_the_algebra_costs_a_kernel_and_after_it_none() -> None:
    b = PlanBuilder("link")
    x = b.mm(b.tile("y", "M", 4), b.weight("wa", 6, 4).t())
    b.output("z", b.mm(rms_norm(x, b.row("g", 6)), b.weight("w", 3, 6).t()))
    plan = b.build()
    assert kinds(schedule(plan))["pointwise"] == 1
    assert kinds(schedule(applied(plan, FORWARD)))["pointwise"] == 0


# ------------------------------------------------------------------------------- invariants
def check_invariants(found: Schedule) -> None:
    """Written once, before it is read; partials leave tiles, vectors leave finalizers."""
    plan = found.plan
    known = {i for i, n in enumerate(plan.nodes) if n.op == "operand"}
    for kernel in found.kernels:
        assert set(kernel.reads) <= known, (kernel.kind, kernel.root)
        for w in kernel.writes:
            assert w not in known
            type_ = plan.nodes[w if w >= 0 else ~w].type
            if w < 0:
                assert plan.nodes[~w].op in REDUCTIONS and kernel.kind in ("gemm", "pointwise")
            elif kernel.kind in ("gemm", "pointwise"):
                assert type_.kind is Kind.TILE
            elif kernel.kind == "finalize":
                assert type_.kind is not Kind.TILE
        known |= set(kernel.writes)
        if kernel.program is not None:
            assert Program.parse(str(kernel.program)) == kernel.program
            assert len(kernel.program.operands) == len(kernel.reads) - 2 * (kernel.kind == "gemm")
        if kernel.plan is not None:
            assert Plan.parse(str(kernel.plan)) == kernel.plan
    assert {o.node for o in plan.outputs} <= known
    contractions = [
        i for i, n in enumerate(plan.nodes) if n.op == "mm" and not plan.parameter_only[i]
    ]
    assert sorted(k.root for k in found.kernels if k.kind == "gemm") == contractions


@examples(20)
@given(plan=plans(), m=TOKENS)
def test_schedules_of_random_plans_are_sound_and_exact(plan: Plan, m: int) -> None:
    inputs = random_inputs(plan, m)
    exact = evaluate(plan, **inputs)
    cotangents = cotangents_of(exact)
    gradients = autograd(plan, inputs, trainable(plan), cotangents)
    for forward, backward in (((), ()), (FORWARD, None), (LAYER_NORM, None)):
        chosen = {} if backward is None else {"backward": backward}
        parts = fused(plan, forward=forward, **chosen)
        check_invariants(schedule(parts.forward))
        check_invariants(schedule(parts.backward))
        outputs, found = run_split(parts, inputs, cotangents)
        assert error(outputs, exact) <= 1e-12
        assert error(found, {n: gradients[n] for n in found}) <= 1e-12


@examples(20)
@given(plan=plans())
def test_joint_plans_can_be_scheduled_whole(plan: Plan) -> None:
    check_invariants(schedule(differentiate(applied(plan, FORWARD), trainable(plan))))


def test_scheduling_is_deterministic() -> None:
    plan = fused(decoder_layer()).backward
    assert schedule(plan).kernels == schedule(Plan.parse(str(plan))).kernels


def test_a_wrong_kernel_is_caught_by_running_the_schedule() -> None:
    plan = applied(decoder_layer(), FORWARD)
    inputs = random_inputs(plan, 5)
    exact = evaluate(plan, **inputs)
    assert error(run(schedule(plan), for_run(inputs, plan)), exact) <= 1e-12
    for what, broken in mutants(decoder_layer(), plan):
        found = run(schedule(broken), for_run(inputs, broken))
        assert error(found, exact) > 1e-12, what


# ------------------------------------------------------------------------------- odd corners
def exact_when_run(plan: Plan, m: int = 5) -> Schedule:
    inputs = random_inputs(plan, m)
    found = schedule(plan)
    check_invariants(found)
    assert error(run(found, for_run(inputs, plan)), evaluate(plan, **inputs)) <= 1e-12
    return found


def test_a_value_that_needs_its_own_rows_sum_gets_a_kernel_after_it() -> None:
    """x − mean(x) cannot be in the epilogue that makes x."""
    b = PlanBuilder("centred")
    x = b.mm(b.tile("y", "M", 4), b.weight("w", 6, 4).t())
    b.output("centred", x - rowmean(x))
    found = exact_when_run(b.build())
    assert kinds(found) == {"gemm": 1, "finalize": 1, "pointwise": 1}


def test_two_contractions_that_need_each_others_sums_do_not_deadlock() -> None:
    b = PlanBuilder("crossed")
    x = b.tile("x", "M", 4)
    p, q = b.mm(x, b.weight("v", 4, 4).t()), b.mm(x, b.weight("w", 4, 4).t())
    b.output("p", p * rowsum(q * q))
    b.output("q", q * rowsum(p * p))
    exact_when_run(b.build())


def test_pairs_within_pairs_are_scheduled_apart() -> None:
    b = PlanBuilder("nested")
    x = b.tile("x", "M", 8)
    z = b.mm(x, b.weight("w", 8, 8).t())
    first, second = unpack(unpack(z)[0])
    b.output("y", silu(first) * second)
    b.output("halves", unpack(z, "halves")[0] * unpack(x, "halves")[1])
    exact_when_run(b.build())


def test_numbers_and_vectors_of_parameters_need_no_kernel() -> None:
    b = PlanBuilder("gemma")
    x = rms_norm(b.tile("x", "M", 4), 1.0 + b.row("g", 4))
    b.output("y", x)
    assert "prepare" not in kinds(exact_when_run(b.build()))


def test_the_gradient_of_a_trained_number_is_summed_over_a_vector() -> None:
    b = PlanBuilder("scalar")
    x = b.tile("x", "M", 4) * (b.row("g", 4) * b.scalar("s"))
    b.output("y", b.mm(x, b.weight("w", 3, 4).t()))
    exact_when_run(fused(b.build()).backward)


def test_an_output_may_be_an_input_and_have_two_names() -> None:
    b = PlanBuilder("same")
    x = b.tile("x", "M", 4)
    y = b.mm(x, b.weight("w", 4, 4).t())
    for name, value in {"x_again": x, "y": y, "y_again": y}.items():
        b.output(name, value)
    exact_when_run(b.build())


@pytest.mark.parametrize("m", [0, 1, 129, 257])
def test_any_number_of_tokens(m: int) -> None:
    plan = decoder_layer()
    parts = fused(plan)
    inputs = random_inputs(plan, m)
    exact = evaluate(plan, **inputs)
    cotangents = cotangents_of(exact)
    outputs, gradients = run_split(parts, inputs, cotangents)
    assert error(outputs, exact) <= 1e-12
    assert error(gradients, autograd(plan, inputs, trainable(plan), cotangents)) <= 1e-12


# -------------------------------------------------------------------------- opaque functions
@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """softmax(x yᵀ) y over tokens, which no epilogue can hold."""

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y.T).softmax(1) @ y

    def backward(
        d: torch.Tensor, out: torch.Tensor, *args: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            leaves = [a.detach().requires_grad_() for a in args]
            return torch.autograd.grad(forward(*leaves), leaves, d)

    monkeypatch.setitem(OPAQUE, "toy", Opaque(forward, backward, lambda a, b: b))
    return "toy"


def test_opaque_functions_sit_between_kernels(toy: str) -> None:
    b = PlanBuilder("attention")
    x = b.tile("x", "M", 6)
    normed = rms_norm(x, b.row("g", 6))
    q, k = (
        rotate(b.mm(normed, b.weight(w, 4, 6).t()), b.rotary("rope"), head_dim=4)
        for w in ("wq", "wk")
    )
    b.output("y", b.mm(b.opaque(toy, q, k), b.weight("wo", 6, 4).t()) + x)
    plan = b.build()
    assert Plan.parse(str(plan)) == plan
    parts = fused(plan)
    inputs = random_inputs(plan, 5)
    exact = evaluate(plan, **inputs)
    cotangents = cotangents_of(exact)
    outputs, gradients = run_split(parts, inputs, cotangents)
    assert error(outputs, exact) <= 1e-12
    assert error(gradients, autograd(plan, inputs, trainable(plan), cotangents)) <= 1e-12
    assert kinds(schedule(parts.forward))["opaque"] == 1


def test_a_layer_norm_link_runs_exactly() -> None:
    plan = layer_norm_link()
    parts = fused(plan, forward=LAYER_NORM)
    inputs = random_inputs(plan, 5)
    exact = evaluate(plan, **inputs)
    cotangents = cotangents_of(exact)
    outputs, gradients = run_split(parts, inputs, cotangents)
    assert error(outputs, exact) <= 1e-12
    assert error(gradients, autograd(plan, inputs, trainable(plan), cotangents)) <= 1e-12
