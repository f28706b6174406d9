"""R8: shifts move past contractions, so LayerNorm does."""

from __future__ import annotations

from codetta.language import functions as f
from codetta.language.types import Kind
from codetta.language.values import Node, Value
from codetta.plan.plan import Plan, PlanBuilder
from codetta.plan.rebuild import rewrite
from codetta.plan.rules.products import mm
from codetta.plan.rules.scales import r1_row_scale, r2_column_scale


def r8_affine_shift(plan: Plan) -> Plan:
    """R8: ((x − μ) ⊙ r ⊙ γ + β) Wᵀ = r ⊙ (x W'ᵀ) − (r μ) ⊙ s + t, with W' = W ⊙ γ, s = W' 1,
    t = W β. So LayerNorm commutes with a GEMM, too, up to a rank-1 correction.

    Stated as two shifts, (u + β) Wᵀ = u Wᵀ + W β and (u − μ) Wᵀ = u Wᵀ − μ ⊙ (W 1); with R1 and R2
    they make the whole. s is summed from the weight that is multiplied with, after R2.
    """

    def rule(b: PlanBuilder, node: Node, args: list[Value]) -> Value | None:
        if node.op != "mm" or node.attr("layout") != "nt":
            return None
        x, w = args
        if x.node.op not in ("add", "sub"):
            return None
        left, right = (Value(b, a) for a in x.node.args)
        if left.type.kind is not Kind.TILE:
            return None
        sign = 1.0 if x.node.op == "add" else -1.0
        if right.type.kind is Kind.ROW:
            shift = b.emit("to_row", f.rowsum(w * right))
        elif right.type.kind is Kind.COL:
            shift = right * b.emit("to_row", f.rowsum(w))
        else:
            return None
        z = mm(b, "nt", left, w)
        return z + shift if sign > 0 else z - shift

    return rewrite(plan, rule)


def layernorm_commutes(plan: Plan) -> Plan:
    """R8 in full: shift out β, R1 pulls r out, R2 folds γ, then μ shifts out."""
    for rule in (r8_affine_shift, r1_row_scale, r2_column_scale, r8_affine_shift):
        plan = rule(plan)
    return plan
