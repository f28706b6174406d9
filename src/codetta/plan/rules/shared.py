"""R6, R7: contractions that share an operand, or are summed, become one."""

from __future__ import annotations

from collections import defaultdict

from codetta.language import functions as f
from codetta.language.types import Kind
from codetta.language.values import Node, Value
from codetta.plan.plan import Plan, PlanBuilder
from codetta.plan.rebuild import Rebuild, rewrite
from codetta.plan.rules.products import mm


def r6_shared_operand(plan: Plan, pairs: str = "adjacent") -> Plan:
    """R6: x W1ᵀ and x W2ᵀ are columns of x [W1; W2]ᵀ.

    Contractions of one activation with parameters are merged where their results stand side by
    side anyway: concatenated (q, k, v), or as two equal halves combined with each other (gate and
    up), which become the pairs of one GEMM: 'adjacent' interleaves the rows of the weights,
    'halves' stacks them, so that the rows of their gradient are two contiguous blocks.
    """
    groups = _shared(plan)
    rebuild = Rebuild(plan)

    def rule(b: PlanBuilder, node: Node, args: list[Value]) -> Value | None:
        if node.op == "cat_cols":
            return _merged_columns(b, args)
        if node.op != "mm" or node.attr("layout") != "nt":
            return None
        pair = groups.get((node.args[0], node.args[1]))
        if pair is None:
            return None
        first, second = (rebuild.get(w) for w in pair)
        member = pair.index(node.args[1])
        merge = "interleave_rows" if pairs == "adjacent" else "stack_rows"
        z = mm(b, "nt", args[0], b.emit(merge, first, second))
        return f.unpack(z, pairs)[member]

    rebuild.rule = rule
    return rebuild.build()


def _shared(plan: Plan) -> dict[tuple[int, int], tuple[int, int]]:
    """(activation, weight) -> the two weights of a gate and up pair."""
    by_activation: dict[int, list[int]] = defaultdict(list)
    in_cat = {a for n in plan.nodes if n.op == "cat_cols" for a in n.args}
    for i, node in enumerate(plan.nodes):
        if node.op != "mm" or node.attr("layout") != "nt" or i in in_cat:
            continue
        if plan.parameter_only[node.args[1]] and not plan.parameter_only[node.args[0]]:
            by_activation[node.args[0]].append(i)
    pairs: dict[tuple[int, int], tuple[int, int]] = {}
    for x, found in by_activation.items():
        if len(found) == 2 and plan.nodes[found[0]].type == plan.nodes[found[1]].type:
            weights = (plan.nodes[found[0]].args[1], plan.nodes[found[1]].args[1])
            pairs |= {(x, w): weights for w in weights}
    return pairs


def _merged_columns(b: PlanBuilder, args: list[Value]) -> Value | None:
    """cat(x W1ᵀ + b1, x W2ᵀ + b2, ...) = x [W1; W2; ...]ᵀ + [b1; b2; ...]."""
    split = [_affine(b, a) for a in args]
    if any(s is None for s in split):
        return None
    mms = [s[0] for s in split if s is not None]
    biases = [s[1] for s in split if s is not None]
    if len({m.node.args[0] for m in mms}) != 1:
        return None
    x = Value(b, mms[0].node.args[0])
    z = mm(b, "nt", x, b.emit("stack_rows", *(Value(b, m.node.args[1]) for m in mms)))
    if all(v is None for v in biases):
        return z
    if any(v is None for v in biases):
        return None
    columns = [b.emit("to_col", v) for v in biases if v is not None]
    return z + b.emit("to_row", b.emit("stack_vectors", *columns))


def _affine(b: PlanBuilder, x: Value) -> tuple[Value, Value | None] | None:
    """(x Wᵀ, bias or None) if x is a contraction with an optional row vector added."""
    if x.node.op == "add":
        left, right = (Value(b, a) for a in x.node.args)
        return (left, right) if right.type.kind is Kind.ROW and _is_linear(left) else None
    return (x, None) if _is_linear(x) else None


def _is_linear(x: Value) -> bool:
    return x.node.op == "mm" and x.node.attr("layout") == "nt"


def r7_sum_of_products(plan: Plan) -> Plan:
    """R7: a1 b1 + a2 b2 = [a1 | a2] [b1; b2], the adjoint of R6 (a sum of dgrads is one GEMM)."""

    def rule(b: PlanBuilder, node: Node, args: list[Value]) -> Value | None:
        if node.op != "add" or any(v.node.op != "mm" for v in args):
            return None
        layouts = {v.node.attr("layout") for v in args}
        if layouts != {"nn"} or args[0].id == args[1].id:
            return None
        (a1, b1), (a2, b2) = ([Value(b, x) for x in v.node.args] for v in args)
        if a1.type.rows != a2.type.rows:
            return None
        left, right = b.emit("cat_cols", a1, a2), b.emit("stack_rows", b1, b2)
        return mm(b, "nn", left, right)

    return rewrite(plan, rule)
