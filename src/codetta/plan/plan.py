"""Plan: what a block computes, as an immutable graph of matrices; and its builder.

A Plan is mathematics: named inputs, operations over (rows, columns), named outputs. The algebra
(:mod:`codetta.plan.rules`) and differentiation turn Plans into Plans; scheduling
(:mod:`codetta.plan.schedule`) then says which operations run in which kernel's epilogue. Tokens are
the symbolic number of rows "M"; all other sizes are numbers.

    p = PlanBuilder("swiglu")
    x, w_gate, w_up = p.tile("x", "M", 64), p.weight("w_gate", 256, 64), p.weight("w_up", 256, 64)
    p.output("y", silu(p.mm(x, w_gate.t())) * p.mm(x, w_up.t()))
    plan = p.build()
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from codetta.errors import ForeignValue, PlanShape
from codetta.language.primitives import PRIMITIVES
from codetta.language.types import Dim, Kind, Type
from codetta.language.values import Node, Tracer, Value, attrs_of
from codetta.plan import layouts  # noqa: F401  (fills the table of operations)
from codetta.plan.operations import OPERATIONS, matrix, operation, size

PARAMETER, ACTIVATION = "parameter", "activation"


@dataclass(frozen=True, slots=True)
class Input:
    """A named input.

    Attributes:
        role: 'parameter' marks what does not depend on the tokens.
        narrow: of a matrix that is kept in fp32 among narrower ones: the dtype it is rounded to
            where it enters a product, as under autocast. "" in Plans of one dtype.
    """

    name: str
    type: Type
    role: str
    narrow: str = ""

    def __str__(self) -> str:
        mark = "param " if self.role == PARAMETER else ""
        wide = f" narrow {self.narrow}" if self.narrow else ""
        return f"{mark}{self.name}: {self.type.kind.value}{size(self.type)}{wide}"


@dataclass(frozen=True, slots=True)
class PlanOutput:
    """A named output. ``scores_only``: it reaches nothing but attention scores (q and k)."""

    name: str
    node: int
    scores_only: bool = False


@dataclass(frozen=True, repr=False)
class Plan:
    """Inputs, nodes in canonical order, outputs. Build one with :class:`PlanBuilder`."""

    name: str
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[PlanOutput, ...]

    @cached_property
    def text(self) -> str:
        """The canonical text; equal plans have equal texts."""
        from codetta.plan.text import format_plan

        return format_plan(self)

    @cached_property
    def line(self) -> str:
        """The canonical text in one line, as operators take it; see :attr:`Program.line`."""
        return self.text.replace("\n", ";")

    @staticmethod
    def parse(text: str) -> Plan:
        """The Plan of a canonical text. Raises ProgramSyntax naming the line."""
        from codetta.plan.text import parse_plan

        return parse_plan(text)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def __hash__(self) -> int:
        return hash(self.text)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def input(self, name: str) -> Input:
        return next(i for i in self.inputs if i.name == name)

    @cached_property
    def parameter_only(self) -> tuple[bool, ...]:
        """For each node: it depends on parameters alone (and not on tokens)."""
        roles = {i.name: i.role == PARAMETER for i in self.inputs}
        known: list[bool] = []
        for node in self.nodes:
            if node.op == "operand":
                known.append(roles[node.attr("name")])
            elif not node.args:
                known.append(node.op == "const" or node.attr("axis") == "n")
            else:
                known.append(all(known[a] for a in node.args))
        return tuple(known)

    @cached_property
    def narrow(self) -> str:
        """The dtype in which products are computed where some matrices are kept in fp32, or ""."""
        return next((i.narrow for i in self.inputs if i.narrow), "")

    def storage(self, i: int) -> str:
        """Storage dtype of a matrix: 'operand', 'accumulator' or a dtype's name."""
        node = self.nodes[i]
        if node.op == "operand":
            return "accumulator" if self.input(node.attr("name")).narrow else "operand"
        if node.op == "round_to":
            return str(node.attr("dtype"))
        if node.op in OPERATIONS and OPERATIONS[node.op].view:
            return self.storage(node.args[0])
        return "operand"

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each node: the nodes that read it, ascending."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for a in dict.fromkeys(node.args):
                found[a].append(i)
        return tuple(map(tuple, found))


class PlanValue(Value):
    """A traced value of a Plan; adds the transpose marker of ``mm(x, w.t())``."""

    __slots__ = ()

    def t(self) -> Transposed:
        """The transpose, to be consumed by ``mm`` only."""
        return Transposed(self)


@dataclass(frozen=True, slots=True)
class Transposed:
    """Marks an argument of ``mm`` as transposed; never materialized."""

    value: Value


class PlanBuilder(Tracer):
    """Records a Plan. Values support arithmetic and all functions of :mod:`codetta.language`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.inputs: dict[str, Input] = {}
        self.outputs: list[PlanOutput] = []

    # ---- inputs
    def input(self, name: str, type_: Type, role: str = ACTIVATION, narrow: str = "") -> PlanValue:
        known = self.inputs.setdefault(name, Input(name, type_, role, narrow))
        if known != Input(name, type_, role, narrow):
            raise PlanShape(
                op="input",
                plan=self.name,
                given=f"two inputs named {name}",
                reason="the types differ",
            )
        return self._own(self.leaf("operand", type_, name=name))

    def tile(self, name: str, rows: Dim, cols: int) -> PlanValue:
        """An activation of (rows, cols)."""
        return self.input(name, matrix(rows, cols))

    def weight(self, name: str, n: int, k: int) -> PlanValue:
        """A parameter in nn.Linear layout (N, K)."""
        return self.input(name, matrix(n, k), PARAMETER)

    def row(self, name: str, cols: int) -> PlanValue:
        """A parameter vector over columns, such as a norm weight or a bias."""
        return self.input(name, Type(Kind.ROW, cols=Fraction(cols)), PARAMETER)

    def col(self, name: str) -> PlanValue:
        """A vector over tokens."""
        return self.input(name, Type(Kind.COL))

    def scalar(self, name: str) -> PlanValue:
        return self.input(name, Type(Kind.SCALAR))

    def rotary(self, name: str) -> PlanValue:
        """Rotary tables and positions."""
        return self.input(name, Type(Kind.ROTARY))

    # ---- operations
    def mm(self, a: Value | Transposed, b: Value | Transposed) -> PlanValue:
        """The contraction a b; ``w.t()`` marks transposes (not both)."""
        ta, tb = isinstance(a, Transposed), isinstance(b, Transposed)
        if ta and tb:
            raise ForeignValue(given="mm with both arguments transposed")
        left = a.value if isinstance(a, Transposed) else a
        right = b.value if isinstance(b, Transposed) else b
        return self._own(self.emit("mm", left, right, layout="tn" if ta else "nt" if tb else "nn"))

    def opaque(self, name: str, *args: Value) -> PlanValue:
        """A registered function the algebra does not look into."""
        return self._own(self.emit("opaque", *args, name=name))

    def emit(self, op: str, *args: Value | float, **attrs: Any) -> Value:
        if op in PRIMITIVES:
            return super().emit(op, *args, **attrs)
        values = tuple(self.lift(a, op) for a in args)
        type_ = operation(op).shape(self.name, attrs, *(v.type for v in values))
        node = Node(op, tuple(v.id for v in values), tuple(attrs.items()), type_)
        return self.simplified_layout(node)

    def simplified_layout(self, node: Node) -> Value:
        """Slices of what was just put together are the parts themselves."""
        if node.op in ("slice_cols", "slice_rows"):
            source = self.nodes[node.args[0]]
            whole = source.type.cols if node.op == "slice_cols" else source.type.rows
            if node.attr("start") == 0 and node.attr("stop") == whole:
                return Value(self, node.args[0])
        if node.op == "every_other_row" and self.nodes[node.args[0]].op == "interleave_rows":
            return Value(self, self.nodes[node.args[0]].args[node.attr("member")])
        if node.op == "permute_rows":
            source = self.nodes[node.args[0]]
            if source.op == "permute_rows" and attrs_of(source) == dict(node.attrs) | {
                "inverse": not node.attr("inverse")
            }:
                return Value(self, source.args[0])
        return self.append(node)

    def typed(self, result: Type) -> Type:
        """In a Plan a matrix is a matrix: pair layouts and completeness matter to schedules."""
        return result.but(path=(), reduced=False)

    def _own(self, value: Value) -> PlanValue:
        return PlanValue(self, value.id)

    # ---- outputs
    def output(self, name: str, value: Value, *, scores_only: bool = False) -> None:
        self.outputs.append(PlanOutput(name, self.lift(value, "output").id, scores_only))

    def build(self) -> Plan:
        """The Plan of what the outputs reach, in canonical order."""
        return make_plan(self.name, list(self.inputs.values()), self.nodes, self.outputs)


def make_plan(
    name: str, inputs: Sequence[Input], nodes: Sequence[Node], outputs: Sequence[PlanOutput]
) -> Plan:
    """Plan with dead nodes and unused inputs dropped and nodes in depth-first order."""
    order: dict[int, int] = {}
    for out in outputs:
        stack = [(out.node, False)]
        while stack:
            i, done = stack.pop()
            if i in order:
                continue
            if done:
                order[i] = len(order)
            else:
                stack.append((i, True))
                stack.extend((a, False) for a in reversed(nodes[i].args))
    fresh = tuple(
        Node(nodes[i].op, tuple(order[a] for a in nodes[i].args), nodes[i].attrs, nodes[i].type)
        for i in order
    )
    used = {n.attr("name") for n in fresh if n.op == "operand"}
    return Plan(
        name,
        tuple(i for i in inputs if i.name in used),
        fresh,
        tuple(PlanOutput(o.name, order[o.node], o.scores_only) for o in outputs),
    )
