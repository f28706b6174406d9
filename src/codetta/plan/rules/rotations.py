"""R9: rotations are orthogonal, and permute within heads."""

from __future__ import annotations

from codetta.language import functions as f
from codetta.language.types import Kind
from codetta.language.values import Node, Value, attrs_of
from codetta.plan.plan import Plan, PlanBuilder
from codetta.plan.rebuild import Rebuild, rewrite
from codetta.plan.rules.products import Factors, factors, mm, scaled


def r9_orthogonal(plan: Plan) -> Plan:
    """R9: a rotation is orthogonal, ⟨R⁻¹ dq, z⟩ = ⟨dq, R z⟩, where R z is already computed.

    So the reduction of RMSNorm's backward over q and k reads the stored q and k and not the
    values before the rotation.
    """

    def rule(b: PlanBuilder, node: Node, args: list[Value]) -> Value | None:
        if node.op != "rowsum" or args[0].type.kind is not Kind.TILE:
            return None
        outer, pairs = Factors(), []
        if args[0].node.op == "mul":
            pairs.append([Value(b, a) for a in args[0].node.args])
        flat = factors(args[0])
        if len(flat.tiles) == 2 and not flat.rows:
            pairs.append(flat.tiles)
        for pair in pairs:
            if pair is flat.tiles:
                outer = flat
            for back, z in (pair, pair[::-1]):
                rotated = _turned(b, back, z)
                if rotated is not None:
                    return scaled(f.rowsum(rotated), outer.cols + outer.scalars)
        return None

    return rewrite(plan, rule)


def _turned(b: PlanBuilder, back: Value, z: Value) -> Value | None:
    """dq ⊙ R z for ``back`` = R⁻¹ dq, if the plan has R z."""
    if back.node.op != "rotate" or not back.node.attr("inverse"):
        return None
    dq, rope = (Value(b, a) for a in back.node.args)
    turn = dict(back.node.attrs)
    turn["inverse"] = False
    number = b._seen.get(("rotate", (z.id, rope.id), tuple(turn.items())))
    return None if number is None else dq * Value(b, number)


def r9_adjacent_pairs(plan: Plan) -> Plan:
    """R9: q kᵀ does not change when the columns of q and of k are permuted alike within a head.

    So rotate-half rotary embedding of x Wᵀ becomes adjacent-pair rotary embedding of x (P W)ᵀ, with
    P a permutation of the rows within each head, for outputs marked ``scores_only``: it must be
    proved that they reach nothing but attention scores. The permutation of the gradient's rows is
    the derivative's own.
    """
    allowed = {o.node for o in plan.outputs if o.scores_only}
    allowed -= {o.node for o in plan.outputs if not o.scores_only}
    rebuild = Rebuild(plan)
    turned = {
        i
        for i, n in enumerate(plan.nodes)
        if n.op == "rotate" and n.attr("pairs") == "halves" and i in allowed and not plan.users[i]
    }

    def rule(b: PlanBuilder, node: Node, args: list[Value]) -> Value | None:
        if node.op != "rotate" or not any(plan.nodes[i] == node for i in turned):
            return None
        attrs = dict(attrs_of(node))
        heads = attrs["heads"] if attrs["heads"] >= 0 else int(node.type.cols) // attrs["head_dim"]
        where = {
            "head_dim": attrs["head_dim"],
            "rotary_dim": attrs["rotary_dim"],
            "heads": heads,
            "inverse": False,
        }
        z = _permuted_columns(b, args[0], where)
        attrs["pairs"] = "adjacent"
        return None if z is None else b.emit("rotate", z, args[1], **attrs)

    rebuild.rule = rule
    return rebuild.build()


def _permuted_columns(b: PlanBuilder, z: Value, where: dict[str, int | bool]) -> Value | None:
    """z with its columns permuted, by permuting rows of weights; None where that is not proved."""
    node = z.node
    args = [Value(b, a) for a in node.args]
    if node.op == "mm" and node.attr("layout") == "nt":
        w = factors(args[1])
        if len(w.tiles) != 1 or w.cols:
            return None
        moved = scaled(b.emit("permute_rows", w.tiles[0], **where), w.rows + w.scalars)
        return mm(b, "nt", args[0], moved)
    if node.op in ("mul", "add"):
        parts = [
            _permuted_columns(b, a, where)
            if a.type.kind is Kind.TILE
            else _permuted_row(b, a, where)
            if a.type.kind is Kind.ROW
            else a
            for a in args
        ]
        return None if any(p is None for p in parts) else b.emit(node.op, *parts)  # type: ignore[arg-type]
    return None


def _permuted_row(b: PlanBuilder, row: Value, where: dict[str, int | bool]) -> Value:
    column = b.emit("to_col", row)
    return b.emit("to_row", b.emit("permute_vector", column, **where))
