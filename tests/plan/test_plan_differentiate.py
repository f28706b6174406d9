"""Differentiation against autograd in fp64, and what a split keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_mutants import mutants
from plan_oracle import autograd, cotangents_of, error, random_inputs
from plan_samples import BACKWARD, FORWARD, applied, decoder_layer, fused, rms_norm, trainable
from plan_strategies import TOKENS, examples, plans

from codetta.language import columns, rowsum, rsqrt
from codetta.language.types import Kind
from codetta.plan import Plan, PlanBuilder, Split, differentiate, evaluate, schedule, split
from codetta.plan.rules import r3_frozen_weight


def matches_autograd(
    plan: Plan, joint: Plan, m: int, wrt: list[str], outputs: list[str] | None = None
) -> bool:
    """The joint Plan's outputs and gradients are those of autograd on ``plan``."""
    inputs = random_inputs(plan, m)
    exact = evaluate(plan, **inputs)
    active = list(exact) if outputs is None else outputs
    cotangents = cotangents_of({n: exact[n] for n in active})
    gradients = autograd(plan, inputs, wrt, cotangents)
    known = inputs | cotangents
    found = evaluate(joint, **{i.name: known[i.name] for i in joint.inputs})
    absent = {f"d_{n}" for n in wrt} - set(found)
    assert all(not gradients[n].any() for n in absent)  # zero gradients need no output
    wanted = {n: g for n, g in gradients.items() if n not in absent}
    return error(found, exact | wanted) <= 1e-12


@examples(40)
@given(plan=plans(), m=TOKENS, data=st.data())
def test_gradients_equal_autograd_for_any_subset_of_inputs_and_cotangents(
    plan: Plan, m: int, data: st.DataObject
) -> None:
    wrt = data.draw(st.lists(st.sampled_from(trainable(plan)), unique=True))
    names = [o.name for o in plan.outputs]
    active = data.draw(st.lists(st.sampled_from(names), unique=True))
    assert matches_autograd(plan, differentiate(plan, wrt, active), m, wrt, active)


def test_a_broken_derivative_is_caught() -> None:
    b = PlanBuilder("link")
    b.output("z", b.mm(rms_norm(b.tile("x", "M", 4), b.row("g", 4)), b.weight("w", 3, 4).t()))
    plan = b.build()
    joint, wrt = differentiate(plan, trainable(plan)), trainable(plan)
    assert matches_autograd(plan, joint, 5, wrt)
    broken = list(mutants(plan, joint))
    assert len(broken) > 20
    assert not [what for what, mutant in broken if matches_autograd(plan, mutant, 5, wrt)]


def test_one_input_reaching_an_output_twice_gets_one_summed_gradient() -> None:
    b = PlanBuilder("twice")
    x, w = b.tile("x", "M", 4), b.weight("w", 4, 4)
    b.output("y", b.mm(b.mm(x, w.t()), w.t()) + x * x)
    b.output("again", x)
    plan = b.build()
    assert matches_autograd(plan, differentiate(plan, ["x", "w"]), 3, ["x", "w"])


# --------------------------------------------------------------------------- frozen weights
def gemms(plan: Plan, layout: str) -> int:
    return sum(n.op == "mm" and n.attr("layout") == layout for n in plan.nodes)


def fused_joint(wrt: list[str]) -> Plan:
    return applied(differentiate(applied(decoder_layer(), FORWARD), wrt), BACKWARD)


def test_frozen_weights_have_no_wgrad() -> None:
    assert gemms(fused_joint(trainable(decoder_layer())), "tn") == 4
    assert gemms(fused_joint(["o", "x0"]), "tn") == 0
    assert gemms(fused_joint(["o", "wd"]), "tn") == 1


def test_a_first_layer_without_inputs_to_train_has_no_dgrad_to_its_inputs() -> None:
    assert gemms(fused_joint(["wo", "wg", "wu", "wd"]), "nn") == 3  # none through wo


def test_a_trained_norm_weight_before_a_frozen_projection_costs_no_wgrad() -> None:
    """dγ is summed over the tokens in the dgrad's epilogue instead."""
    wrt = ["o", "g1", "g2"]
    joint = r3_frozen_weight(fused_joint(wrt))
    assert gemms(joint, "tn") == 0
    assert matches_autograd(decoder_layer(), joint, 5, wrt)


# ------------------------------------------------------------------------------------- split
def reads_only_what_is_handed_over(plan: Plan, parts: Split) -> bool:
    inputs = {i.name for i in plan.inputs}
    cotangents = {f"d_{o.name}" for o in plan.outputs}
    known = inputs | cotangents | set(parts.saved)
    forward = {o.name for o in parts.forward.outputs}
    return {i.name for i in parts.backward.inputs} <= known and set(parts.saved) <= forward


def saved_values(parts: Split) -> dict[str, str]:
    """What each saved value is: its kind and columns."""
    nodes = {o.name: parts.forward.nodes[o.node].type for o in parts.forward.outputs}
    return {
        n: "column" if nodes[n].kind is Kind.COL else f"{nodes[n].cols} columns"
        for n in parts.saved
    }


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_saves_both_streams_both_norms_the_gate_and_qkv(bias: bool) -> None:
    """{x1, r1, z, x2, r2, qkv}: D = 8, 2 F = 24, and 32 columns of q, k and v."""
    parts = fused(decoder_layer(bias=bias))
    found = saved_values(parts)
    assert list(found.values()) == [
        "8 columns", "column", "24 columns", "8 columns", "column", "32 columns",
    ]  # fmt: skip
    assert [n for n in found if not n.startswith("saved_")] == ["x2", "qkv"]


def test_without_recomputation_the_output_of_the_gate_is_saved_too() -> None:
    """12 columns more, and the kernel that makes dz stores dz alone."""
    found = saved_values(fused(decoder_layer(), recompute=False))
    assert list(found.values()) == [
        "8 columns", "column", "24 columns", "12 columns", "8 columns", "column", "32 columns",
    ]  # fmt: skip
    stores = {}
    for recompute in (True, False):
        kernels = schedule(fused(decoder_layer(), recompute=recompute).backward).kernels
        programs = [k.program for k in kernels if k.program is not None]
        (dz,) = (p for p in programs if "width=2" in p.text)
        stores[recompute] = dz.text.count("store ")
    assert stores == {True: 2, False: 1}


def test_a_backward_without_one_cotangent_saves_less() -> None:
    """Without d_qkv neither q, k, v nor the second norm matter."""
    parts = fused(decoder_layer(), cotangents=["x2"])
    assert list(saved_values(parts).values()) == ["8 columns", "column", "24 columns"]
    assert "d_qkv" not in {i.name for i in parts.backward.inputs}


def test_nothing_wanted_saves_nothing() -> None:
    parts = fused(decoder_layer(), wrt=[])
    assert parts.saved == () and parts.backward.outputs == ()
    assert [o.name for o in parts.forward.outputs] == ["x2", "qkv"]


@examples(30)
@given(plan=plans(), m=TOKENS, recompute=st.booleans())
def test_the_halves_of_a_split_compute_what_the_joint_plan_does(
    plan: Plan, m: int, recompute: bool
) -> None:
    joint = applied(differentiate(applied(plan, FORWARD), trainable(plan)), BACKWARD)
    parts = split(joint, recompute)
    assert reads_only_what_is_handed_over(plan, parts)
    inputs = random_inputs(plan, m)
    forward = evaluate(parts.forward, **inputs)
    cotangents = cotangents_of({o.name: forward[o.name] for o in plan.outputs})
    known = inputs | cotangents
    exact = evaluate(joint, **{i.name: known[i.name] for i in joint.inputs})
    known |= forward
    if parts.backward.outputs:
        given_ = {i.name: known[i.name] for i in parts.backward.inputs}
        forward |= evaluate(parts.backward, **given_)
    assert error({n: forward[n] for n in exact}, exact) <= 1e-12


def test_saved_matrices_are_not_saved_in_two_forms() -> None:
    """z = r ⊙ acc is kept and not the accumulator beside it."""
    b = PlanBuilder("link")
    x = b.tile("x", "M", 4)
    r = rsqrt(rowsum(x * x) / columns(x) + 1e-5)
    b.output("z", b.mm(x * r, b.weight("w", 3, 4).t()))
    parts = fused(b.build())
    assert list(saved_values(parts).values()) == ["column", "3 columns"]
