"""Where matrices of two widths meet: what enters a product is rounded to the narrower dtype."""

from __future__ import annotations

from codetta.language import functions as f
from codetta.language.types import Kind
from codetta.language.values import Node, Value, attrs_of
from codetta.plan.plan import Plan, PlanBuilder
from codetta.plan.rebuild import Rebuild


def narrowed(plan: Plan) -> Plan:
    """Round what is kept in fp32, and what is made of such parameters, where a product reads it.

    So products run in the narrow dtype as under autocast, while a residual stream and its gradient
    stay in fp32: the kernel that makes one stores it twice. It comes after all other rules, which
    see products of the values themselves.
    """
    if not plan.narrow:
        return plan
    wide, fixed = _wide(plan), plan.parameter_only
    number = {node: i for i, node in enumerate(plan.nodes)}

    def rule(b: PlanBuilder, node: Node, args: list[Value]) -> Value | None:
        # Weights are narrow for epilogues, too: one prepared weight serves both.
        here = [
            wide[a] and (node.op == "mm" or fixed[a]) and not fixed[number[node]] for a in node.args
        ]
        if not any(here):
            return None
        sides = [f.round_to(x, plan.narrow) if to else x for to, x in zip(here, args, strict=True)]
        return b.emit(node.op, *sides, **attrs_of(node))

    return Rebuild(plan, rule).build()


def _wide(plan: Plan) -> list[bool]:
    """Matrices kept in fp32, and what is prepared from parameters that are."""
    found: list[bool] = []
    for i, node in enumerate(plan.nodes):
        tile = node.type.kind is Kind.TILE
        kept = tile and plan.storage(i) == "accumulator"
        made = tile and plan.parameter_only[i] and any(found[a] for a in node.args)
        found.append(kept or made)
    return found
