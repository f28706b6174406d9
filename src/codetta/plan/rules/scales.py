"""R1, R2, R4: scales move past contractions."""

from __future__ import annotations

from codetta.language.values import Node, Value
from codetta.plan.plan import Plan, PlanBuilder
from codetta.plan.rebuild import rewrite
from codetta.plan.rules.products import mm, one_tile, scaled


def r1_row_scale(plan: Plan) -> Plan:
    """R1: (r ⊙ x) Wᵀ = r ⊙ (x Wᵀ), and scalars likewise.

    So RMSNorm's r moves from in front of a GEMM into its epilogue.
    """

    def rule(b: PlanBuilder, node: Node, args: list[Value]) -> Value | None:
        if node.op != "mm" or node.attr("layout") != "nt":
            return None
        found = one_tile(args[0])
        if not found or not (found.cols or found.scalars):
            return None
        inner = scaled(found.tiles[0], found.rows)
        return scaled(mm(b, "nt", inner, args[1]), found.cols + found.scalars)

    return rewrite(plan, rule)


def r2_column_scale(plan: Plan) -> Plan:
    """R2: (x ⊙ γ) Wᵀ = x (W ⊙ γ)ᵀ, so a norm's weight folds into the weight of the next GEMM.

    Its adjoints, which keep the folded weight out of the backward: dz (W ⊙ γ) = (dz W) ⊙ γ and
    dzᵀ (x ⊙ γ) = (dzᵀ x) ⊙ γ.
    """

    def rule(b: PlanBuilder, node: Node, args: list[Value]) -> Value | None:
        if node.op != "mm":
            return None
        layout = node.attr("layout")
        if layout == "nt":
            found = one_tile(args[0])
            if not found or not found.rows:
                return None
            outer = scaled(found.tiles[0], found.cols + found.scalars)
            return mm(b, "nt", outer, scaled(args[1], found.rows))
        found = one_tile(args[1])
        if not found or not found.rows:
            return None
        inner = scaled(found.tiles[0], found.cols + found.scalars)
        return scaled(mm(b, layout, args[0], inner), found.rows)

    return rewrite(plan, rule)


def r4_wgrad_row_scale(plan: Plan) -> Plan:
    """R4: dzᵀ (r ⊙ x) = (r ⊙ dz)ᵀ x, so dgrad and wgrad read one stored r ⊙ dz and the saved x."""

    def rule(b: PlanBuilder, node: Node, args: list[Value]) -> Value | None:
        if node.op != "mm" or node.attr("layout") != "tn":
            return None
        found = one_tile(args[1])
        if not found or not found.cols:
            return None
        right = scaled(found.tiles[0], found.rows + found.scalars)
        return mm(b, "tn", scaled(args[0], found.cols), right)

    return rewrite(plan, rule)
