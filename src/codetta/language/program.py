"""Program: what happens to one output tile, as an immutable and hashable value.

A Program has declared operands, nodes in a canonical order, and named outputs. Tile-valued outputs
are stores; reduced outputs are finals: arithmetic on completed reductions, the *finalizer*, a small
program over rows (or columns) that runs after all tiles. ``str(program)`` is the canonical text and
``Program.parse(text)`` its inverse; nothing downstream reads the author's Python.

A Program without an ``acc`` node needs no GEMM: it is a pointwise or row kernel over its operands.
Derivatives and finalizers are such Programs, so one class, one printer and one executor serve all.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

from codetta.errors import BooleanValue, UnusedOperand
from codetta.language.primitives import REDUCTIONS
from codetta.language.types import Kind, Type, default_path
from codetta.language.values import Node


@dataclass(frozen=True, slots=True)
class Operand:
    """A declared operand: name, kind and, for tiles and rows, width and pair layout."""

    name: str
    kind: Kind
    width: Fraction = Fraction(1)
    pairs: str = "adjacent"

    @property
    def type(self) -> Type:
        wide = self.kind in (Kind.TILE, Kind.ROW)
        return Type(
            self.kind,
            cols=self.width if wide else Fraction(1),
            path=default_path(self.width, self.pairs) if wide else (),
        )

    def __str__(self) -> str:
        if self.kind not in (Kind.TILE, Kind.ROW) or self.width == 1:
            return f"{self.name}: {self.kind.value}"
        layout = f", pairs={self.pairs}" if self.width in (Fraction(1, 2), 2) else ""
        return f"{self.name}: {self.kind.value}(width={self.width}{layout})"


@dataclass(frozen=True, slots=True)
class Output:
    """A named result: node number and storage dtype ('operand', 'accumulator', 'bf16', ...)."""

    name: str
    node: int
    dtype: str


@dataclass(frozen=True)
class Program:
    """Operands, nodes and outputs of one epilogue (or of a pointwise or row kernel).

    Attributes:
        name: as in the listing; part of the identity.
        operands: in declaration order.
        nodes: in canonical order (depth first from the outputs); arguments come first.
        outputs: stores and finals in the order in which the author named them.
        bare: the author returned a single value, so a call returns a tensor and no tuple.
    """

    name: str
    operands: tuple[Operand, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    bare: bool = field(default=False)

    def __post_init__(self) -> None:
        # Dynamo reads text and line as attributes; it cannot trace the properties that make them.
        self.line  # noqa: B018

    # ---- construction
    @staticmethod
    def build(
        name: str,
        operands: Sequence[Operand],
        nodes: Sequence[Node],
        outputs: Sequence[Output],
        *,
        bare: bool = False,
        allow_unused: bool = False,
    ) -> Program:
        """Canonical Program: dead nodes dropped, nodes renumbered depth first from the outputs.

        Raises:
            UnusedOperand: an operand reaches no output.
            BooleanValue: an output is a comparison.
        """
        order: dict[int, int] = {}

        def visit(root: int) -> None:  # iterative: derived programs can be deep
            stack = [(root, False)]
            while stack:
                i, done = stack.pop()
                if i in order:
                    continue
                if done:
                    order[i] = len(order)
                else:
                    stack.append((i, True))
                    stack.extend((a, False) for a in reversed(nodes[i].args))

        for out in outputs:
            visit(out.node)
            if nodes[out.node].type.boolean:
                raise BooleanValue(
                    op=f"output {out.name!r}", needed="numbers", given="a comparison"
                )
        used = {nodes[i].attr("name") for i in order if nodes[i].op == "operand"}
        for operand in operands:
            if operand.name not in used and not allow_unused:
                raise UnusedOperand(operand=operand.name, name=name)
        fresh = [
            Node(nodes[i].op, tuple(order[a] for a in nodes[i].args), nodes[i].attrs, nodes[i].type)
            for i in order
        ]
        return Program(
            name,
            tuple(o for o in operands if o.name in used),
            tuple(fresh),
            tuple(Output(o.name, order[o.node], o.dtype) for o in outputs),
            bare,
        )

    # ---- identity
    @cached_property
    def text(self) -> str:
        """The canonical text; equal programs have equal texts."""
        from codetta.language.text import format_program

        return format_program(self)

    @cached_property
    def line(self) -> str:
        """The canonical text in one line, as operators take it.

        Inductor copies an operator's arguments into comments of the code that it generates, where
        a second line would be code.
        """
        return self.text.replace("\n", ";")

    @staticmethod
    def parse(text: str) -> Program:
        """The Program of a canonical text. Raises ProgramSyntax naming the line."""
        from codetta.language.text import parse_program

        return parse_program(text)

    def __str__(self) -> str:
        return self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        # Caches compare programs on every call; node by node that takes tens of microseconds.
        return self is other or (isinstance(other, Program) and self.text == other.text)

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of the text, for cache keys."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    # ---- what is in it
    @cached_property
    def has_acc(self) -> bool:
        return any(n.op == "acc" for n in self.nodes)

    @cached_property
    def reductions(self) -> tuple[int, ...]:
        """Numbers of the reduction nodes, in order; each is one partial per tile."""
        return tuple(i for i, n in enumerate(self.nodes) if n.op in REDUCTIONS)

    @property
    def stores(self) -> tuple[Output, ...]:
        return tuple(o for o in self.outputs if not self.nodes[o.node].type.reduced)

    @property
    def finals(self) -> tuple[Output, ...]:
        return tuple(o for o in self.outputs if self.nodes[o.node].type.reduced)

    def operand(self, name: str) -> Operand:
        return next(o for o in self.operands if o.name == name)

    @property
    def signature(self) -> str:
        inputs = ["acc"] if self.has_acc else []
        inputs += [str(o) for o in self.operands]
        return f"{self.name}({', '.join(inputs)}) -> {', '.join(o.name for o in self.outputs)}"

    @cached_property
    def partial_names(self) -> dict[int, str]:
        """Name of each reduction's raw partial: its output's, numbered where one has several."""
        owner: dict[int, str] = {}
        for out in self.outputs:
            below = [i for i in self.reachable(out.node) if i in self.reductions]
            for i in below:
                owner.setdefault(i, out.name if len(below) == 1 else f"{out.name}_{below.index(i)}")
        return owner

    def reachable(self, root: int) -> list[int]:
        """Node numbers that ``root`` depends on, itself included, ascending."""
        seen, stack = {root}, [root]
        while stack:
            for a in self.nodes[stack.pop()].args:
                if a not in seen:
                    seen.add(a)
                    stack.append(a)
        return sorted(seen)

    # ---- tiles
    @cached_property
    def uses_halves(self) -> bool:
        """True if columns j and j + N/2 are paired: a tile then holds columns of both halves."""
        return any(
            n.op == "unpack" and n.attr("pairs") == "halves" and not self.nodes[n.args[0]].type.path
            for n in self.nodes
        )

    @cached_property
    def granule(self) -> int:
        """N and tile_n must be multiples of this: pairs, heads and groups stay inside a tile."""
        need = 2 if self.uses_halves else 1
        for node in self.nodes:
            if node.type.has_cols:
                args = (self.nodes[a].type for a in node.args)
                widths = [node.type.cols, *(t.cols for t in args if t.has_cols)]
                # tile_n times the widest of them must hold whole blocks
                need = math.lcm(
                    need, node.type.cols.denominator, (_block(node) / max(widths)).numerator
                )
        return need


def _block(node: Node) -> Fraction:
    """Columns that a node looks at together: a head, a group, the halves of a head."""
    attrs: dict[str, Any] = dict(node.attrs)
    if node.op == "rotate":
        return Fraction(attrs["head_dim"])
    if node.op in ("group_sum", "ungroup"):
        return Fraction(attrs["size"])
    if node.op in ("unpack", "pack") and attrs["pairs"].startswith("halves:"):
        return Fraction(attrs["pairs"].split(":")[1])
    return Fraction(1)
