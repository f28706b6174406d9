"""The canonical text of a Program and its parser.

    program residual_ssq(acc, residual: Tile) {
      %0 = acc
      %1 = operand(name=residual)
      %2 = add(%0, %1)
      %3 = round_to(%2, dtype=operand)
      %4 = mul(%3, %3)
      %5 = rowsum(%4)
      store x: operand = %3
      final ssq: accumulator = %5
    }

Types are not written: they follow from the operands by the SHAPE rules, and parsing derives them
again, so a text that says something impossible is refused like a function that does.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NoReturn

from codetta.errors import CodettaError, ProgramSyntax
from codetta.language import shapes  # noqa: F401
from codetta.language.primitives import PRIMITIVES, SHAPE
from codetta.language.program import Operand, Output, Program
from codetta.language.types import Kind, Type
from codetta.language.values import AttrValue, Node

INDENT = "  "


def format_program(program: Program) -> str:
    """The canonical text, one node a line."""
    inputs = (["acc"] if program.has_acc else []) + [str(o) for o in program.operands]
    lines = [f"program {program.name}({', '.join(inputs)}) {{"]
    lines += [f"{INDENT}%{i} = {format_node(node)}" for i, node in enumerate(program.nodes)]
    for out in program.outputs:
        kind = "final" if program.nodes[out.node].type.reduced else "store"
        kind = "return" if program.bare else kind
        lines.append(f"{INDENT}{kind} {out.name}: {out.dtype} = %{out.node}")
    return "\n".join([*lines, "}"])


def format_node(node: Node) -> str:
    inside = [f"%{a}" for a in node.args] + [f"{k}={_format(v)}" for k, v in node.attrs]
    return f"{node.op}({', '.join(inside)})" if inside else node.op


def _format(value: AttrValue) -> str:
    if isinstance(value, float):
        return f"{value!r}"
    return "''" if value == "" else str(value)


_HEADER = re.compile(r"program (\w+)\((.*)\) \{")
_OPERAND = re.compile(r"(\w+): (\w+)(?:\(width=([\d/]+)(?:, pairs=([\w:]+))?\))?")
_NODE = re.compile(r"%(\d+) = (\w+)(?:\((.*)\))?")
_OUTPUT = re.compile(r"(store|final|return) (\w+): (\w+) = %(\d+)")


def parse_program(text: str) -> Program:
    """Read a canonical text back. Raises ProgramSyntax naming line, text and what was expected."""
    lines = numbered(text)
    reader = _Reader()
    if not lines:
        reader.fail(1, "", "Expected `program NAME(acc, operand: Kind, ...) {`.")
    reader.header(*lines[0])
    if len(lines) < 2 or lines[-1][1] != "}":
        reader.fail(*lines[-1], "Expected `}` at the end.")
    for number, line in lines[1:-1]:
        reader.line(number, line)
    return reader.program(lines[-1])


def numbered(text: str) -> list[tuple[int, str]]:
    """(number, text) of the lines that are not empty; a semicolon ends a line, too."""
    lines = text.replace(";", "\n").splitlines()
    return [(i, line.strip()) for i, line in enumerate(lines, 1) if line.strip()]


class _Reader:
    def __init__(self) -> None:
        self.name = ""
        self.operands: dict[str, Operand] = {}
        self.nodes: list[Node] = []
        self.outputs: list[Output] = []
        self.bare = False

    def fail(self, number: int, line: str, expected: str) -> NoReturn:
        raise ProgramSyntax(line=number, text=line, expected=expected)

    def header(self, number: int, line: str) -> None:
        match = _HEADER.fullmatch(line)
        if not match:
            self.fail(number, line, "Expected `program NAME(acc, operand: Kind, ...) {`.")
        self.name, inside = match[1], match[2]
        for part in re.split(r", (?=\w+: )|, (?=acc\b)", inside) if inside else []:
            if part == "acc":
                continue
            operand = _OPERAND.fullmatch(part)
            kinds = {k.value: k for k in Kind}
            if not operand or operand[2] not in kinds:
                self.fail(number, part, f"Expected `name: Kind` with one of {', '.join(kinds)}.")
            width = Fraction(operand[3] or 1)
            self.operands[operand[1]] = Operand(
                operand[1], kinds[operand[2]], width, operand[4] or "adjacent"
            )

    def line(self, number: int, line: str) -> None:
        if match := _NODE.fullmatch(line):
            if int(match[1]) != len(self.nodes):
                self.fail(number, line, f"Expected `%{len(self.nodes)} = ...`.")
            self.nodes.append(self.node(number, line, match[2], match[3]))
        elif match := _OUTPUT.fullmatch(line):
            if int(match[4]) >= len(self.nodes):
                self.fail(number, line, f"There are only {len(self.nodes)} nodes.")
            self.bare = match[1] == "return"
            self.outputs.append(Output(match[2], int(match[4]), match[3]))
        else:
            self.fail(number, line, "Expected `%N = primitive(...)` or `store NAME: DTYPE = %N`.")

    def node(self, number: int, line: str, op: str, inside: str | None) -> Node:
        if op not in PRIMITIVES:
            self.fail(number, line, f"{op!r} is no primitive.")
        args: list[int] = []
        attrs: list[tuple[str, AttrValue]] = []
        for part in inside.split(", ") if inside else []:
            if re.fullmatch(r"%\d+", part) and int(part[1:]) < len(self.nodes):
                args.append(int(part[1:]))
            elif re.fullmatch(r"\w+=[^=]+", part):
                key, value = part.split("=")
                attrs.append((key, read_attribute(key, value)))
            else:
                self.fail(number, line, f"{part!r} is neither an earlier node nor attribute=value.")
        if PRIMITIVES[op].arity not in (-1, len(args)):
            self.fail(number, line, f"{op} takes {PRIMITIVES[op].arity} values.")
        try:
            type_ = self.type(op, args, dict(attrs))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, CodettaError):
                raise
            self.fail(number, line, f"{op} needs the attributes {PRIMITIVES[op].attrs}.")
        return Node(op, tuple(args), tuple(attrs), type_)

    def type(self, op: str, args: list[int], attrs: dict[str, AttrValue]) -> Type:
        if op == "acc":
            return Type(Kind.TILE)
        if op in ("const", "extent"):
            return Type(Kind.SCALAR)
        if op == "operand":
            return self.operands[str(attrs["name"])].type
        result: Type = SHAPE[op](op, attrs, *(self.nodes[a].type for a in args))
        return result

    def program(self, last: tuple[int, str]) -> Program:
        if not self.outputs:
            self.fail(*last, "Expected at least one output before `}`.")
        return Program.build(
            self.name, list(self.operands.values()), self.nodes, self.outputs, bare=self.bare
        )


def read_attribute(key: str, text: str) -> AttrValue:
    """Attributes are typed by their form; only constants and exponents are always floats."""
    if key in ("value", "exponent"):
        return float(text)
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if re.fullmatch(r"\d+/\d+", text):
        return Fraction(text)
    return "" if text == "''" else text
