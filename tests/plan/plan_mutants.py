"""Broken rules: what a rule wrote, with one node negated, off by 1 %, or missing a factor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from codetta.language.values import Node, Value
from codetta.plan import Plan, PlanBuilder
from codetta.plan.rebuild import Rebuild


def values(plan: Plan) -> list[Value]:
    """The nodes of a Plan as values, for predicates."""
    rebuild = Rebuild(plan)
    return [rebuild.get(i) for i in range(len(plan.nodes))]


def count(plan: Plan, predicate: Callable[[Value], bool]) -> int:
    return sum(map(predicate, values(plan)))


def written_by_rule(before: Plan, after: Plan) -> list[Node]:
    """Nodes of ``after`` whose expression does not occur in ``before``."""
    known = set(_expressions(before))
    found = zip(after.nodes, _expressions(after), strict=True)
    return [node for node, expression in found if node.args and expression not in known]


def _expressions(plan: Plan) -> list[int]:
    found: list[int] = []
    for node in plan.nodes:
        found.append(hash((node.op, tuple(found[a] for a in node.args), node.attrs)))
    return found


def mutants(before: Plan, after: Plan) -> Iterator[tuple[str, Plan]]:
    """Every Plan that differs from ``after`` in one node that the rule wrote."""
    for target in written_by_rule(before, after):
        yield f"-{target.op}", _replaced(after, target, lambda x: -x)
        yield f"1.01 {target.op}", _replaced(after, target, lambda x: 1.01 * x)
        first = after.nodes[target.args[0]]
        if target.op == "mul" and first.type == target.type:
            yield "dropped factor", _replaced(after, target, _first_argument)


def _first_argument(x: Value) -> Value:
    return Value(x.tracer, x.node.args[0])


def _replaced(plan: Plan, target: Node, change: Callable[[Value], Value]) -> Plan:
    def rule(b: PlanBuilder, node: Node, args: list[Value]) -> Value | None:
        return change(b.emit(node.op, *args, **dict(node.attrs))) if node == target else None

    return Rebuild(plan, rule).build()
