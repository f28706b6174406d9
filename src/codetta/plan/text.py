"""The canonical text of a Plan and its parser; the grammar of nodes is the Program's.

plan swiglu(x: Tile(M, 64), param w: Tile(256, 64)) {
  %0 = operand(name=x)
  %1 = operand(name=w)
  %2 = mm(%0, %1, layout=nt)
  output y = %2
}
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NoReturn

from codetta.errors import CodettaError, ProgramSyntax
from codetta.language.primitives import PRIMITIVES, SHAPE
from codetta.language.text import INDENT, format_node, numbered, read_attribute
from codetta.language.types import Kind, Type
from codetta.language.values import AttrValue, Node
from codetta.plan.operations import OPERATIONS, operation, size
from codetta.plan.plan import ACTIVATION, PARAMETER, Input, Plan, PlanOutput, make_plan


def format_plan(plan: Plan, *, sizes: bool = False) -> str:
    """The canonical text; with ``sizes`` each line also says what it computes (not parsed)."""
    lines = [f"plan {plan.name}({', '.join(map(str, plan.inputs))}) {{"]
    for i, node in enumerate(plan.nodes):
        line = f"{INDENT}%{i} = {format_node(node)}"
        lines.append(f"{line:<58} # {size(node.type)}" if sizes else line)
    for out in plan.outputs:
        mark = " scores_only" if out.scores_only else ""
        lines.append(f"{INDENT}output {out.name} = %{out.node}{mark}")
    return "\n".join([*lines, "}"])


_HEADER = re.compile(r"plan (\w+)\((.*)\) \{")
_INPUT = re.compile(r"(param )?(\w+): (\w+)\((\w+), (\d+)\)(?: narrow (\w+))?")
_NODE = re.compile(r"%(\d+) = (\w+)(?:\((.*)\))?")
_OUTPUT = re.compile(r"output (\w+) = %(\d+)( scores_only)?")


def parse_plan(text: str) -> Plan:
    """Read a canonical text back. Raises ProgramSyntax naming line, text and what was expected."""
    lines = numbered(text)
    if not lines or not (header := _HEADER.fullmatch(lines[0][1])):
        _fail(*(lines or [(1, "")])[0], "Expected `plan NAME(input: Kind(rows, cols), ...) {`.")
    inputs = [
        _input(lines[0][0], part) for part in re.split(r", (?=(?:param )?\w+: )", header[2]) if part
    ]
    types = {i.name: i.type for i in inputs}
    nodes: list[Node] = []
    outputs: list[PlanOutput] = []
    for number, line in lines[1:-1]:
        if match := _NODE.fullmatch(line):
            if int(match[1]) != len(nodes):
                _fail(number, line, f"Expected `%{len(nodes)} = ...`.")
            nodes.append(_node(header[1], number, line, match[2], match[3], nodes, types))
        elif (out := _OUTPUT.fullmatch(line)) and int(out[2]) < len(nodes):
            outputs.append(PlanOutput(out[1], int(out[2]), out[3] is not None))
        else:
            _fail(number, line, "Expected `%N = operation(...)` or `output NAME = %N`.")
    if lines[-1][1] != "}":
        _fail(*lines[-1], "Expected `}` at the end.")
    return make_plan(header[1], inputs, nodes, outputs)


def _fail(number: int, line: str, expected: str) -> NoReturn:
    raise ProgramSyntax(line=number, text=line, expected=expected)


def _input(number: int, text: str) -> Input:
    match = _INPUT.fullmatch(text)
    kinds = {k.value: k for k in Kind}
    if not match or match[3] not in kinds:
        _fail(number, text, "Expected `name: Kind(rows, cols)`, with `param ` before a parameter.")
    kind = kinds[match[3]]
    bare = Type(kind)
    rows = int(match[4]) if match[4].isdigit() and bare.has_rows else "M"
    cols = Fraction(match[5]) if bare.has_cols else Fraction(1)
    role = PARAMETER if match[1] else ACTIVATION
    return Input(match[2], Type(kind, cols=cols, rows=rows), role, match[6] or "")


def _node(
    plan: str,
    number: int,
    line: str,
    op: str,
    inside: str | None,
    nodes: list[Node],
    types: dict[str, Type],
) -> Node:
    args: list[int] = []
    attrs: list[tuple[str, AttrValue]] = []
    for part in inside.split(", ") if inside else []:
        if re.fullmatch(r"%\d+", part) and int(part[1:]) < len(nodes):
            args.append(int(part[1:]))
        elif re.fullmatch(r"\w+=[^=]+", part):
            key, value = part.split("=")
            attrs.append((key, read_attribute(key, value)))
        else:
            _fail(number, line, f"{part!r} is neither an earlier node nor attribute=value.")
    try:
        type_ = _type(plan, op, dict(attrs), [nodes[a].type for a in args], types)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, CodettaError):
            raise
        _fail(number, line, f"{op} takes other values or attributes.")
    if type_ is None:
        _fail(number, line, f"{op!r} is no operation, or names no input.")
    return Node(op, tuple(args), tuple(attrs), type_)


def _type(
    plan: str, op: str, attrs: dict[str, AttrValue], given: list[Type], inputs: dict[str, Type]
) -> Type | None:
    """Type of a node; None if there is no such operation or input."""
    if op == "operand":
        return inputs.get(str(attrs["name"]))
    if op in ("const", "extent"):
        return Type(Kind.SCALAR)
    if op in OPERATIONS:
        return operation(op).shape(plan, attrs, *given)
    if op in PRIMITIVES and op != "acc":
        result: Type = SHAPE[op](op, attrs, *given)
        return result.but(path=(), reduced=False)
    return None
