"""R1 to R9 on random Plans: same outputs in fp64, fires where it should and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from plan_mutants import count, mutants, written_by_rule
from plan_oracle import random_inputs, same
from plan_samples import (
    BACKWARD,
    FORWARD,
    Rule,
    applied,
    decoder_layer,
    layer_norm_link,
    rms_norm,
    trainable,
)
from plan_strategies import TOKENS, examples, plans

from codetta.language import columns, rotate, rowsum, rsqrt, silu
from codetta.language.types import Kind
from codetta.language.values import Value
from codetta.plan import RULES, Plan, PlanBuilder, differentiate, evaluate
from codetta.plan.rules import (
    layernorm_commutes,
    r1_row_scale,
    r2_column_scale,
    r3_adjoint_row_sum,
    r3_frozen_weight,
    r4_wgrad_row_scale,
    r5_partial_reductions,
    r6_shared_operand,
    r7_sum_of_products,
    r8_affine_shift,
    r9_adjacent_pairs,
    r9_orthogonal,
    read_stored,
)
from codetta.plan.rules.products import factors


# ------------------------------------------------------------------------- what a rule removes
def is_mm(layout: str) -> Callable[[Value], bool]:
    return lambda v: v.node.op == "mm" and v.node.attr("layout") == layout


def argument(v: Value, i: int) -> Value:
    return Value(v.tracer, v.node.args[i])


def mm_scaled_by(layout: str, i: int, kind: Kind) -> Callable[[Value], bool]:
    """Contractions whose argument i is one matrix times a vector of this kind."""

    def found(v: Value) -> bool:
        if not is_mm(layout)(v):
            return False
        product = factors(argument(v, i))
        vectors = product.cols + product.rows
        return len(product.tiles) == 1 and any(x.type.kind is kind for x in vectors)

    return found


def sum_over(op: str, inner: Callable[[Value], bool]) -> Callable[[Value], bool]:
    """Row or column sums of a product one of whose matrices is ``inner``."""
    return lambda v: v.node.op == op and any(map(inner, factors(argument(v, 0)).tiles))


def unscaled_sum(v: Value) -> bool:
    """⟨dz, z0⟩ of an accumulator that is not scaled by its norm."""
    scales = factors(argument(v, 0)).cols if v.node.op == "rowsum" else []
    return sum_over("rowsum", is_mm("nt"))(v) and all(c.node.op != "rsqrt" for c in scales)


def shifted_mm(v: Value) -> bool:
    return is_mm("nt")(v) and argument(v, 0).node.op in ("add", "sub")


def unturned(v: Value) -> bool:
    return v.node.op == "rotate" and bool(v.node.attr("inverse"))


# ------------------------------------------------------------------------------ sample Plans
def joint(plan: Plan, wrt: list[str] | None = None) -> Plan:
    return differentiate(plan, trainable(plan) if wrt is None else wrt)


def rms_joint() -> Plan:
    """RMSNorm and Linear, differentiated as they stand."""
    b = PlanBuilder("rms_link")
    x = b.tile("x", "M", 6)
    b.output("z", b.mm(rms_norm(x, b.row("g", 6)), b.weight("w", 5, 6).t()))
    return joint(b.build())


def two_consumers() -> Plan:
    b = PlanBuilder("two")
    x = b.tile("x", "M", 6)
    b.output("y", b.mm(x, b.weight("w1", 5, 6).t()))
    b.output("z", b.mm(x, b.weight("w2", 4, 6).t()))
    return joint(b.build())


def fused_joint(*rules: Rule, bias: bool = False) -> Plan:
    return applied(joint(applied(decoder_layer(bias=bias), FORWARD)), rules)


def frozen_joint() -> Plan:
    """Norm weights trained, projections frozen."""
    return applied(joint(applied(decoder_layer(), FORWARD), ["o", "g1", "g2"]), BACKWARD)


@dataclass(frozen=True)
class Case:
    """A Plan on which ``rule`` replaces all ``count`` places that match ``pattern``."""

    rule: Rule
    plan: Plan
    pattern: Callable[[Value], bool]
    count: int
    left: int = 0


def r5(plan: Plan) -> Plan:
    return r5_partial_reductions(plan, 3)


def r6_halves(plan: Plan) -> Plan:
    return r6_shared_operand(plan, pairs="halves")


LAYER = decoder_layer()
CASES = {
    "R1": Case(r1_row_scale, LAYER, mm_scaled_by("nt", 0, Kind.COL), 5),
    "R2": Case(r2_column_scale, r1_row_scale(LAYER), mm_scaled_by("nt", 0, Kind.ROW), 5),
    "R2 dgrad": Case(r2_column_scale, fused_joint(), mm_scaled_by("nn", 1, Kind.ROW), 2),
    "R3 rows": Case(
        r3_adjoint_row_sum, r1_row_scale(rms_joint()), sum_over("rowsum", is_mm("nn")), 1
    ),
    "R3 columns": Case(
        r3_adjoint_row_sum,
        applied(rms_joint(), (r1_row_scale, r2_column_scale, r4_wgrad_row_scale)),
        sum_over("colsum", is_mm("nn")), 1,
    ),
    "R3 frozen": Case(r3_frozen_weight, frozen_joint(), is_mm("tn"), 2),
    "R4": Case(r4_wgrad_row_scale, rms_joint(), mm_scaled_by("tn", 1, Kind.COL), 1),
    "R5": Case(
        r5, LAYER, lambda v: v.node.op == "rowsum" and argument(v, 0).type.cols > 3, 2
    ),
    "R6": Case(r6_shared_operand, LAYER, is_mm("nt"), 7, left=4),
    "R6 halves": Case(r6_halves, LAYER, is_mm("nt"), 7, left=4),
    "R7": Case(r7_sum_of_products, two_consumers(), is_mm("nn"), 2, left=1),
    "R8": Case(r8_affine_shift, layer_norm_link(), shifted_mm, 1),
    "LayerNorm": Case(layernorm_commutes, layer_norm_link(), mm_scaled_by("nt", 0, Kind.COL), 0),
    "R9": Case(
        r9_orthogonal, fused_joint(*BACKWARD[:-1]), sum_over("rowsum", unturned), 1
    ),
    "stored": Case(read_stored, fused_joint(*BACKWARD[:-2]), unscaled_sum, 2),
    "stored, bias": Case(
        read_stored, fused_joint(*BACKWARD[:-2], bias=True), unscaled_sum, 2
    ),
    "stored, LayerNorm": Case(
        read_stored, joint(layernorm_commutes(layer_norm_link())),
        lambda v: v.node.op == "rowsum" and any(
            is_mm("nt")(argument(x, 0)) for x in factors(argument(v, 0)).tiles if x.node.op == "sub"
        ), 1,
    ),
}  # fmt: skip
by_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
EVERY_RULE = {**RULES, "R3 frozen": r3_frozen_weight, "R5": r5, "stored": read_stored,
              "LayerNorm": layernorm_commutes}  # fmt: skip


# ------------------------------------------------------------------------------------- tests
@by_case
def test_a_rule_rewrites_every_place_it_is_made_for(case: Case) -> None:
    after = case.rule(case.plan)
    assert count(case.plan, case.pattern) == case.count
    assert count(after, case.pattern) == case.left
    assert written_by_rule(case.plan, after)


@by_case
@pytest.mark.parametrize("m", [1, 5])
def test_a_rewritten_plan_computes_the_same(case: Case, m: int) -> None:
    assert same(case.plan, case.rule(case.plan), m)


@by_case
def test_a_rule_that_is_applied_twice_changes_nothing_more(case: Case) -> None:
    once = case.rule(case.plan)
    assert case.rule(once) == once


@by_case
def test_a_broken_rule_is_caught(case: Case) -> None:
    after = case.rule(case.plan)
    survivors = [what for what, broken in mutants(case.plan, after) if same(case.plan, broken)]
    assert not survivors


@pytest.mark.parametrize("name", EVERY_RULE)
@examples(12)
@given(plan=plans(), m=TOKENS)
def test_rules_hold_on_random_forwards(name: str, plan: Plan, m: int) -> None:
    assert same(plan, EVERY_RULE[name](plan), m)


@examples(25)
@given(plan=plans(max_blocks=2), m=TOKENS)
def test_rules_hold_on_random_joint_plans_one_after_another(plan: Plan, m: int) -> None:
    after = joint(applied(plan, FORWARD))
    for rule in (*BACKWARD, r3_adjoint_row_sum, r3_frozen_weight, r7_sum_of_products):
        before, after = after, rule(after)
        assert same(before, after, m), rule.__name__


# ------------------------------------------------------------------------- where rules must not
def small(build: Callable[[PlanBuilder], Value]) -> Plan:
    b = PlanBuilder("small")
    b.output("y", build(b))
    return b.build()


def test_r1_leaves_scales_of_columns_and_plain_inputs_alone() -> None:
    plan = small(lambda b: b.mm(b.tile("x", "M", 4) * b.row("g", 4), b.weight("w", 3, 4).t()))
    assert r1_row_scale(plan) == plan


def test_r3_needs_the_product_that_it_reads() -> None:
    """rowsum((dz W) ⊙ h) stays where h Wᵀ is not computed anyway."""
    plan = small(
        lambda b: rowsum(b.mm(b.tile("dz", "M", 3), b.weight("w", 3, 4)) * b.tile("h", "M", 4))
    )
    assert r3_adjoint_row_sum(plan) == plan


def test_r3_frozen_keeps_a_wgrad_that_somebody_wants() -> None:
    plan = applied(joint(applied(LAYER, FORWARD)), BACKWARD)
    assert r3_frozen_weight(plan) == plan


def test_r6_keeps_contractions_of_different_activations_apart() -> None:
    def build(b: PlanBuilder) -> Value:
        x, y = b.tile("x", "M", 4), b.tile("y", "M", 4)
        gate, up = b.mm(x, b.weight("wg", 3, 4).t()), b.mm(y, b.weight("wu", 3, 4).t())
        return silu(gate) * up

    assert r6_shared_operand(small(build)) == small(build)


def test_r7_adds_no_products_in_linear_layout() -> None:
    def build(b: PlanBuilder) -> Value:
        x, y = b.tile("x", "M", 4), b.tile("y", "M", 4)
        return b.mm(x, b.weight("v", 3, 4).t()) + b.mm(y, b.weight("w", 3, 4).t())

    assert r7_sum_of_products(small(build)) == small(build)


def test_r9_does_not_mix_two_rotations() -> None:
    """⟨R1⁻¹ dq, z⟩ is not ⟨dq, R2 z⟩."""

    def build(b: PlanBuilder) -> Value:
        z, dq = b.tile("z", "M", 4), b.tile("dq", "M", 4)
        b.output("q", rotate(z, b.rotary("rope"), head_dim=4))
        return rowsum(rotate(dq, b.rotary("other"), head_dim=4, inverse=True) * z)

    assert r9_orthogonal(small(build)) == small(build)


def test_stored_values_are_divided_by_norms_only() -> None:
    """A scale that may be zero is no divisor."""

    def build(b: PlanBuilder) -> Value:
        z0 = b.mm(b.tile("x", "M", 4), b.weight("w", 3, 4).t())
        b.output("z", z0 * b.col("r"))
        return rowsum(b.tile("dz", "M", 3) * z0)

    assert read_stored(small(build)) == small(build)


def test_a_norm_of_what_another_norm_scales_keeps_both_scales() -> None:
    """Σ (r z0)² has r twice, and none of them may get lost."""
    b = PlanBuilder("norm_of_projection")
    x = b.tile("x", "M", 6)
    z = b.mm(rms_norm(x, b.row("g", 6)), b.weight("w", 5, 6).t())
    b.output("z", rms_norm(z, b.row("h", 5)))
    before = applied(joint(applied(b.build(), FORWARD)), BACKWARD[:2])
    assert same(before, read_stored(before))


# ------------------------------------------------------------------- R9: pairs within heads
HEADS, KV, E = 4, 2, 6


def attention_input(*, scores_only: bool = True, cached: bool = False, bias: bool = True) -> Plan:
    """q, k, v of one RMSNorm, rotate-half on 4 of 6 columns, after R6, R1 and R2."""
    b = PlanBuilder("qkv")
    x = b.tile("x", "M", 5)
    x = x * rsqrt(rowsum(x * x) / columns(x) + 1e-5) * b.row("g", 5)
    parts: list[Value] = []
    for name, heads in (("q", HEADS), ("k", KV), ("v", KV)):
        z = b.mm(x, b.weight(f"w{name}", heads * E, 5).t())
        parts.append(z + b.row(f"b{name}", heads * E) if bias else z)
    qkv = rotate(b.emit("cat_cols", *parts), b.rotary("rope"), head_dim=E, rotary_dim=4,
                 heads=HEADS + KV)  # fmt: skip
    b.output("qkv", qkv, scores_only=scores_only)
    if cached:
        b.output("cache", qkv)
    return applied(b.build(), FORWARD)


def attention(qkv: torch.Tensor) -> torch.Tensor:
    """softmax(q kᵀ) v per head."""
    q, k, v = qkv.unflatten(1, (-1, E)).split((HEADS, KV, KV), dim=1)
    k, v = (x.repeat_interleave(HEADS // KV, dim=1) for x in (k, v))
    scores = torch.einsum("mhe,nhe->hmn", q, k)
    return torch.einsum("hmn,nhe->mhe", scores.softmax(2), v)


@pytest.mark.parametrize("bias", [False, True])
def test_adjacent_pairs_change_no_score_and_no_gradient(bias: bool) -> None:
    plan = attention_input(bias=bias)
    paired = r9_adjacent_pairs(plan)
    assert [n.attr("pairs") for n in paired.nodes if n.op == "rotate"] == ["adjacent"]
    inputs = random_inputs(plan, 7)
    names = [n for n in inputs if n != "rope"]
    leaves = {n: inputs[n].requires_grad_() for n in names}
    results = []
    for p in (plan, paired):
        qkv = evaluate(p, **inputs)["qkv"]
        out = attention(qkv)
        gradient = torch.autograd.grad(
            out.square().sum(), [qkv, *leaves.values()], retain_graph=True
        )
        with torch.no_grad():
            derived = evaluate(joint(p, names), **inputs, d_qkv=gradient[0])
        results.append((qkv, out, gradient[1:], [derived[f"d_{n}"] for n in names]))
    (qkv, out, exact, _), (qkv2, out2, gradients, derived) = results
    assert not torch.allclose(qkv, qkv2)
    torch.testing.assert_close(out2, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, exact, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(derived, list(exact), rtol=1e-11, atol=1e-12)


def test_columns_stay_where_more_than_scores_see_them() -> None:
    for plan in (attention_input(scores_only=False), attention_input(cached=True)):
        assert r9_adjacent_pairs(plan) == plan


def test_values_of_heads_that_do_not_rotate_are_not_permuted() -> None:
    plan = attention_input()
    inputs = random_inputs(plan, 3)
    before, after = (evaluate(p, **inputs)["qkv"] for p in (plan, r9_adjacent_pairs(plan)))
    assert torch.equal(before[:, (HEADS + KV) * E :], after[:, (HEADS + KV) * E :])


def test_permuting_one_of_q_and_k_only_is_caught() -> None:
    plan = attention_input()
    inputs = random_inputs(plan, 3)
    before, after = (evaluate(p, **inputs)["qkv"] for p in (plan, r9_adjacent_pairs(plan)))
    mixed = torch.cat((after[:, : HEADS * E], before[:, HEADS * E :]), 1)
    assert not torch.allclose(attention(before), attention(mixed))
