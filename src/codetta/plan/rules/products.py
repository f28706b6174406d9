"""Products as products: a nest of multiplications flattened into its matrix and its vectors.

So (x ⊙ r) ⊙ γ and x ⊙ (γ ⊙ r) meet the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce

from codetta.language.types import Kind
from codetta.language.values import Value
from codetta.plan.plan import PlanBuilder


@dataclass
class Factors:
    """A product by kind of factor; ``tiles`` are matrices, the rest broadcast."""

    tiles: list[Value] = field(default_factory=list)
    cols: list[Value] = field(default_factory=list)
    rows: list[Value] = field(default_factory=list)
    scalars: list[Value] = field(default_factory=list)


def factors(x: Value) -> Factors:
    """Flatten a nest of ``mul`` (and ``neg``) into its factors."""
    found = Factors()
    stack = [x]
    while stack:
        v = stack.pop()
        if v.node.op == "mul":
            stack += [Value(v.tracer, a) for a in reversed(v.node.args)]
        elif v.node.op == "neg":
            stack += [Value(v.tracer, v.node.args[0]), v.tracer.const(-1.0)]
        else:
            by_kind = {
                Kind.TILE: found.tiles,
                Kind.COL: found.cols,
                Kind.ROW: found.rows,
                Kind.SCALAR: found.scalars,
            }
            by_kind[v.type.kind].append(v)
    return found


def product(*values: Value) -> Value:
    """Product of at least one value, left to right."""
    return reduce(lambda a, b: a * b, values)


def scaled(x: Value, scales: list[Value]) -> Value:
    return product(x, product(*scales)) if scales else x


def mm(b: PlanBuilder, layout: str, x: Value, y: Value) -> Value:
    return b.emit("mm", x, y, layout=layout)


def one_tile(x: Value) -> Factors | None:
    """Factors of x if exactly one of them is a matrix and there is a vector to move."""
    found = factors(x)
    moves = found.cols or found.rows or found.scalars
    return found if len(found.tiles) == 1 and moves else None


def existing(b: PlanBuilder, layout: str, x: Value, y: Value) -> Value | None:
    """The contraction if the plan already has it."""
    number = b._seen.get(("mm", (x.id, y.id), (("layout", layout),)))
    return None if number is None else Value(b, number)
