"""Copies of Plans with some nodes replaced: what rules, derivatives and splits are made of."""

from __future__ import annotations

from collections.abc import Callable

from codetta.errors import PlanShape
from codetta.language.values import Node, Value, attrs_of
from codetta.plan.plan import Plan, PlanBuilder

#: (builder, node, arguments already rebuilt) -> the value to use instead, or None.
Rule = Callable[[PlanBuilder, Node, list[Value]], Value | None]


class Rebuild:
    """Copies a Plan node by node into a new builder; a rule may replace any node.

    A value that replaces a node must be of the node's type.
    """

    def __init__(self, plan: Plan, rule: Rule | None = None, name: str | None = None) -> None:
        self.plan, self.rule = plan, rule
        self.builder = PlanBuilder(name or plan.name)
        for i in plan.inputs:
            self.builder.inputs[i.name] = i
        self.done: dict[int, Value] = {}
        self.leaf: Callable[[int], Value | None] = lambda i: None

    def get(self, i: int) -> Value:
        """The rebuilt value of node i; ``leaf`` may put an input in the place of any node."""
        stack = [i]
        while stack:
            j = stack[-1]
            if j in self.done:
                stack.pop()
                continue
            leaf = self.leaf(j)
            missing = (
                []
                if leaf is not None
                else [a for a in self.plan.nodes[j].args if a not in self.done]
            )
            if missing:
                stack += missing
            else:
                self.done[j] = self.one(j) if leaf is None else leaf
        return self.done[i]

    def one(self, i: int) -> Value:
        node = self.plan.nodes[i]
        if not node.args:
            return self.builder.append(node)
        args = [self.get(a) for a in node.args]
        replaced = self.rule(self.builder, node, args) if self.rule else None
        if replaced is not None:
            if replaced.type != node.type:
                raise PlanShape(
                    op=f"the rewriting of {node.op}",
                    plan=self.plan.name,
                    given=f"{node.type} and {replaced.type}",
                    reason="a rule must keep the type",
                )
            return Value(self.builder, replaced.id)
        return self.builder.emit(node.op, *args, **attrs_of(node))

    def build(self) -> Plan:
        for out in self.plan.outputs:
            self.builder.output(out.name, self.get(out.node), scores_only=out.scores_only)
        return self.builder.build()


def rewrite(plan: Plan, rule: Rule) -> Plan:
    """Apply a local rule at every node, once, in order."""
    return Rebuild(plan, rule).build()
