"""The finalizer of a program: what follows its reductions, as a Program over raw partials."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from codetta.language.functions import as_attribute
from codetta.language.primitives import REDUCTION
from codetta.language.program import Operand, Output, Program
from codetta.language.trace import ProgramTracer
from codetta.language.types import Kind
from codetta.language.values import Value, attrs_of


@dataclass(frozen=True)
class Finalizer:
    """A Program without accumulator whose outputs are the finals of another.

    Attributes:
        program: its operands are the vectors and scalars that the finals use, and ``Partial``s.
        reads: for each operand, the name of the operand it repeats, or (reduction node, component).
    """

    program: Program
    reads: tuple[str | tuple[int, int], ...]


@lru_cache(maxsize=1024)
def finalizer(program: Program) -> Finalizer | None:
    """The finalizer, None where the program reduces nothing."""
    return _Finals(program).made() if program.finals else None


class _Finals:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.tracer = ProgramTracer(f"{program.name}_final")
        self.operands: dict[str, Operand] = {}
        self.reads: dict[str, str | tuple[int, int]] = {}
        self.done: dict[int, Value] = {}

    def made(self) -> Finalizer:
        outputs = [Output(o.name, self.value(o.node).id, o.dtype) for o in self.program.finals]
        made = Program.build(
            self.tracer.name, list(self.operands.values()), self.tracer.nodes, outputs
        )
        return Finalizer(made, tuple(self.reads[o.name] for o in made.operands))

    def value(self, i: int) -> Value:
        if i not in self.done:
            self.done[i] = self._value(i)
        return self.done[i]

    def _value(self, i: int) -> Value:
        node = self.program.nodes[i]
        if node.op in ("const", "extent"):
            return self.tracer.append(node)
        if node.op == "operand":
            operand = self.program.operand(node.attr("name"))
            return self._declare(operand, operand.name)
        if i in self.program.reductions:
            return self._combined(i)
        args = [self.value(a) for a in node.args]
        return self.tracer.emit(node.op, *args, **attrs_of(node))

    def _combined(self, i: int) -> Value:
        node = self.program.nodes[i]
        parts = [
            self._declare(Operand(f"partial{i}_{name}", Kind.PARTIAL), (i, component))
            for component, name in enumerate(REDUCTION[node.op].components)
        ]
        cols, path = node.type.cols, "/".join(node.type.path)
        return self.tracer.emit(
            "combine", *parts, reduction=node.op, width=as_attribute(cols), path=path
        )

    def _declare(self, operand: Operand, read: str | tuple[int, int]) -> Value:
        self.operands[operand.name] = operand
        self.reads[operand.name] = read
        return self.tracer.operand(operand)
