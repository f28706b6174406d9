"""Equal layers, equal Plans: inputs are numbered in the order in which the Plan first reads them.

A region's inputs are named after the graph's nodes, which differ from layer to layer. Numbered,
the middle layers of a decoder have one Plan, so that the algebra, the derivative, the schedules and
the kernels are made once, however many layers there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from codetta.capture.join import IS_ROTATED
from codetta.errors import CodettaError
from codetta.language.types import Kind
from codetta.language.values import Node
from codetta.nn.block import ADJACENT, BACKWARD, compiled
from codetta.plan.plan import Input, Plan, PlanOutput, make_plan
from codetta.plan.rules import layernorm_commutes, r6_shared_operand, r9_adjacent_pairs


def numbered(plan: Plan) -> dict[str, str]:
    """The shared name of each input."""
    names = {IS_ROTATED: IS_ROTATED}
    for node in plan.nodes:
        if node.op == "operand":
            names.setdefault(str(node.attr("name")), f"in_{len(names) - 1}")
    return names


def shared(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The Plan that all regions like this one have."""
    return renamed(plan, names, "region", sort=True)


@lru_cache(maxsize=256)
def optimized(plan: Plan, pairs: str) -> Plan:
    """The Plan after the forward's algebra, for a pair layout."""
    plan = r6_shared_operand(plan, pairs=pairs)
    plan = layernorm_commutes(plan)
    return r9_adjacent_pairs(plan) if pairs == ADJACENT else plan


@lru_cache(maxsize=256)
def fault(plan: Plan, pairs: str) -> str | None:
    """Why the Plan has no schedules, forward and backward, in a pair layout; None if it has."""
    try:
        made = optimized(plan, pairs)
        names = tuple(i.name for i in made.inputs if i.type.kind is not Kind.ROTARY)
        compiled(made, names, tuple(o.name for o in made.outputs), BACKWARD)
    except CodettaError as error:
        return str(error).splitlines()[0]
    return None


def renamed(plan: Plan, names: Mapping[str, str], title: str, sort: bool = False) -> Plan:
    """The same Plan with other names of its inputs; with ``sort`` in the order of the names."""

    def node(x: Node) -> Node:
        if x.op != "operand":
            return x
        attrs = tuple((k, names[str(v)] if k == "name" else v) for k, v in x.attrs)
        return Node(x.op, x.args, attrs, x.type)

    def input_(x: Input) -> Input:
        return replace(x, name=names[x.name])

    inputs = [input_(x) for x in plan.inputs]
    if sort:
        place = {name: i for i, name in enumerate(names.values())}
        inputs.sort(key=lambda x: place[x.name])
    outputs = [PlanOutput(o.name, o.node, o.scores_only) for o in plan.outputs]
    return make_plan(title, inputs, [node(x) for x in plan.nodes], outputs)
