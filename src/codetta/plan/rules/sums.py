"""R3, R5 and the reading of stored values: row and column sums where they are cheapest."""

from __future__ import annotations

from functools import reduce

from codetta.language import functions as f
from codetta.language.types import Kind
from codetta.language.values import Node, Value
from codetta.plan.plan import Plan, PlanBuilder
from codetta.plan.rebuild import Rebuild, rewrite
from codetta.plan.rules.products import Factors, existing, factors, product, scaled


def r3_adjoint_row_sum(plan: Plan) -> Plan:
    """R3: ⟨dz W, h⟩ = ⟨dz, h Wᵀ⟩, where the right side is known before the GEMM dz W has run.

    Its column twin colsum((dz W) ⊙ h) = colsum over n of (W ⊙ (dzᵀ h)), which needs a weight-sized
    tile only; and without h: rowsum(dz W) = ⟨dz, W 1⟩ and colsum(dz W) = (colsum dz) W. The first
    two are used where h Wᵀ (dzᵀ h) is already computed; the others always.
    """

    def rule(b: PlanBuilder, node: Node, args: list[Value]) -> Value | None:
        if node.op not in ("rowsum", "colsum") or args[0].type.kind is not Kind.TILE:
            return None
        found = factors(args[0])
        for i, dgrad in enumerate(found.tiles):
            if dgrad.node.op != "mm" or dgrad.node.attr("layout") != "nn":
                continue
            dz, w = (Value(b, a) for a in dgrad.node.args)
            others = found.tiles[:i] + found.tiles[i + 1 :]
            moved = _row_sum if node.op == "rowsum" else _col_sum
            result = moved(b, dz, w, others, found)
            if result is not None:
                return result
        return None

    rebuild = Rebuild(plan, rule)
    for i, node in enumerate(plan.nodes):  # so that "already computed" does not depend on order
        if node.op == "mm":
            rebuild.get(i)
    return rebuild.build()


def _row_sum(
    b: PlanBuilder, dz: Value, w: Value, others: list[Value], found: Factors
) -> Value | None:
    outer = found.cols + found.scalars
    if not others:
        ones = scaled(w, found.rows)
        return scaled(f.rowsum(dz * b.emit("to_row", f.rowsum(ones))), outer)
    h = scaled(product(*others), found.rows)
    z = existing(b, "nt", h, w)
    if z is None and found.rows:  # γ may have been folded into the weight (R2)
        z = existing(b, "nt", product(*others), scaled(w, found.rows))
    return None if z is None else scaled(f.rowsum(dz * z), outer)


def _col_sum(
    b: PlanBuilder, dz: Value, w: Value, others: list[Value], found: Factors
) -> Value | None:
    outer = found.rows + found.scalars
    left = scaled(dz, found.cols)
    if not others:
        column = b.emit("to_col", f.colsum(left))
        return scaled(f.colsum(w * column), outer)
    h = product(*others)
    wgrad = existing(b, "tn", left, h)
    if wgrad is None:
        wgrad = existing(b, "tn", dz, scaled(h, found.cols))
    return None if wgrad is None else scaled(f.colsum(w * wgrad), outer)


def r3_frozen_weight(plan: Plan) -> Plan:
    """R3's column twin read backwards: colsum(W ⊙ (dzᵀ h)) = colsum((dz W) ⊙ h).

    Used where dzᵀ h serves nothing else and dz W is computed anyway: W is frozen and γ is trained.
    Then dγ is reduced over the tokens, in the dgrad's epilogue, and there is no wgrad.
    """
    found: dict[Node, tuple[int, int]] = {}  # the sum -> (dz W, h)
    known = {(n.op, n.args, n.attrs): i for i, n in enumerate(plan.nodes)}
    for i, node in enumerate(plan.nodes):
        if node.op != "mm" or node.attr("layout") != "tn" or len(plan.users[i]) != 1:
            continue
        (user,) = plan.users[i]
        product = plan.nodes[user]
        if product.op != "mul" or product.args.count(i) != 1 or len(plan.users[user]) != 1:
            continue
        total = plan.nodes[plan.users[user][0]]
        (w,) = (a for a in product.args if a != i)
        dgrad = known.get(("mm", (node.args[0], w), (("layout", "nn"),)))
        if total.op == "colsum" and dgrad is not None:
            found[total] = dgrad, node.args[1]
    rebuild = Rebuild(plan)

    def rule(b: PlanBuilder, node: Node, args: list[Value]) -> Value | None:
        if node not in found:
            return None
        dgrad, h = (rebuild.get(i) for i in found[node])
        return f.colsum(dgrad * h)

    rebuild.rule = rule
    return rebuild.build()


def r5_partial_reductions(plan: Plan, width: int) -> Plan:
    """R5: rowsum(x) = Σ_t rowsum(x[:, t]), over column tiles t of the given width.

    Schedules use it implicitly: an epilogue writes the partial of its tile and a finalizer adds
    them up. Here it is spelled out, so that it can be tested like the others.
    """

    def rule(b: PlanBuilder, node: Node, args: list[Value]) -> Value | None:
        if node.op != "rowsum" or args[0].type.kind is not Kind.TILE:
            return None
        cols = int(args[0].type.cols)
        if cols <= width:
            return None
        parts = [
            f.rowsum(b.emit("slice_cols", args[0], start=i, stop=min(i + width, cols)))
            for i in range(0, cols, width)
        ]
        return reduce(lambda p, q: p + q, parts)

    return rewrite(plan, rule)


def read_stored(plan: Plan) -> Plan:
    """⟨dz, z0⟩ = ⟨dz, z − b⟩ / r where z = r ⊙ z0 + b is what was stored and r > 0.

    r is the reciprocal square root of a norm, hence positive; z0 is x Wᵀ, for LayerNorm
    x Wᵀ − μ ⊙ s; b, a sum of row vectors, is absent in most models. Without this rule the backward
    would keep (or compute again) z0 beside z.
    """

    def rule(b: PlanBuilder, node: Node, args: list[Value]) -> Value | None:
        if node.op != "rowsum" or args[0].type.kind is not Kind.TILE:
            return None
        found = factors(args[0])
        if len(found.tiles) != 2 or found.rows or found.tiles[0].id == found.tiles[1].id:
            return None  # Σ z0² is a norm's own statistic, taken where z is made
        for dz, z0 in (found.tiles, found.tiles[::-1]):
            scaling = _norm_scale(b, z0)
            if scaling is None:
                continue
            r, z = scaling
            z, biases = _with_biases(b, z)
            total = f.rowsum(dz * z)
            if biases:
                total = total - f.rowsum(dz * reduce(lambda p, q: p + q, biases))
            outer = list(found.cols)
            ours = next((i for i, c in enumerate(outer) if c.id == r.id), None)
            if ours is None:
                total = total / r
            else:
                del outer[ours]  # one of them: r may scale dz as well
            return scaled(total, outer + found.scalars)
        return None

    return rewrite(plan, rule)


def _norm_scale(b: PlanBuilder, z0: Value) -> tuple[Value, Value] | None:
    """(r, r ⊙ z0) if z0 comes from a contraction and the plan scales it by an rsqrt."""
    inner = Value(b, z0.node.args[0]) if z0.node.op == "sub" else z0
    if inner.node.op != "mm" or inner.node.attr("layout") != "nt":
        return None
    for i, node in enumerate(b.nodes):
        if node.op == "mul" and node.args[0] == z0.id and b.nodes[node.args[1]].op == "rsqrt":
            return Value(b, node.args[1]), Value(b, i)
    return None


def _with_biases(b: PlanBuilder, z: Value) -> tuple[Value, list[Value]]:
    """(z + b1 + b2 ..., [b1, b2, ...]) as far as the plan adds row vectors to z."""
    biases = []
    for i, node in enumerate(b.nodes):
        shifts = node.op == "add" and node.args[0] == z.id
        if shifts and b.nodes[node.args[1]].type.kind is Kind.ROW:
            biases.append(Value(b, node.args[1]))
            z = Value(b, i)
    return z, biases
