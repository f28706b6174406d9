"""LOWERING: each primitive as an expression of QuACK's traced epilogue functions.

An epilogue function is called once per accumulator element (or adjacent pair) while the kernel is
traced; what it returns is the code. A value of the language becomes one or two fp32 *lanes*: two
where it is as wide as an adjacent pair, else one. A rule takes the emitter, the node and its
arguments' lanes and returns the lanes of the result as Python expressions; it raises
:class:`NotLowerable` where QuACK has no form for it.

Precision. Plain arithmetic is fp32 and rounded per operation, save that the compiler contracts
a b + c. exp, sigmoid and tanh go through the special-function unit's exp2 and reciprocal: relative
error below 1e-6, a thousandth of bf16's. tanh is 1 - 2 / (1 + e^2x) and not the hardware's
tanh.approx, whose error of 5e-4 is as large as fp16's. Everything else is the accurate library
function.

NaN. The hardware's max and min drop a NaN, PyTorch's keep it; so maximum, minimum and relu are
comparisons and selects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from codetta.language.primitives import Table, _computed
from codetta.language.values import Node

Lanes = tuple[str, ...]


class NotLowerable(Exception):
    """A program that QuACK's mainloop cannot carry; the message says why, in a clause."""


class Emitter(Protocol):
    """What rules may ask of the code generator."""

    def let(self, expression: str) -> str:
        """Name an expression, so that it is written once."""

    def lanes_of(self, node: int) -> int:
        """Number of lanes of a node."""

    def storage_type(self, dtype: str) -> str | None:
        """cutlass type of a storage dtype, None where it is fp32 and rounding changes nothing."""

    def reduce(self, number: int, args: list[Lanes]) -> None:
        """Declare the sink of a reduction node."""

    def rotary(self, number: int) -> tuple[str, str, str | None]:
        """cos, sin, and the mask of the columns that turn (None if all do) for a rotate node."""

    def onehot(self, number: int) -> Lanes:
        """1 where the column is the row's index, else 0."""


Rule = Callable[[Emitter, int, Node, list[Lanes]], Lanes]
LOWERING: Table[Rule] = Table("LOWERING", "codetta.backends.cuda.rules", _computed)


def _lane(lanes: Lanes, i: int) -> str:
    return lanes[i] if len(lanes) > 1 else lanes[0]


def lanewise(template: str, count: int, args: list[Lanes]) -> Lanes:
    """The template, with {0}, {1}, ... the arguments' lanes; one-lane arguments are repeated."""
    return tuple(template.format(*(_lane(a, i) for a in args)) for i in range(count))


def _map(template: str) -> Rule:
    def rule(emit: Emitter, number: int, node: Node, args: list[Lanes]) -> Lanes:
        return lanewise(template, emit.lanes_of(number), args)

    return rule


def _select(condition: str, yes: str, no: str) -> str:
    return f"F32(cutlass.select_({condition}, F32({yes}), F32({no})))"


LOG2_E = math.log2(math.e)
_EXP = "exp2(F32({0}) * " + repr(LOG2_E) + ", fastmath=True)"
_EXP2X = _EXP.replace(repr(LOG2_E), repr(2.0 * LOG2_E))  # e^2x

for _name, _template in {
    "neg": "(-{0})",
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "abs": "math.abs(F32({0}))",
    "exp": f"math.{_EXP}",
    "log": "math.log(F32({0}))",
    "sqrt": "math.sqrt(F32({0}))",
    "rsqrt": "math.rsqrt(F32({0}))",
    "sin": "math.sin(F32({0}))",
    "cos": "math.cos(F32({0}))",
    "erf": "math.erf(F32({0}))",
    "sigmoid": f"math.rcp(1.0 + math.{_EXP.replace('* ', '* -', 1)}, approx=True, ftz=True)",
    "tanh": f"(1.0 - 2.0 * math.rcp(1.0 + math.{_EXP2X}, approx=True, ftz=True))",
    "relu": _select("{0} < 0.0", "0.0", "{0}"),
    "maximum": _select("(F32({0}) >= F32({1})) | (F32({0}) != F32({0}))", "{0}", "{1}"),
    "minimum": _select("(F32({0}) <= F32({1})) | (F32({0}) != F32({0}))", "{0}", "{1}"),
    "lt": "(F32({0}) < F32({1}))",
    "le": "(F32({0}) <= F32({1}))",
    "gt": "(F32({0}) > F32({1}))",
    "ge": "(F32({0}) >= F32({1}))",
    "eq": "(F32({0}) == F32({1}))",
    "ne": "(F32({0}) != F32({1}))",
    "where": _select("{0}", "{1}", "{2}"),
    "broadcast": "{0}",
}.items():
    LOWERING.rule(_name)(_map(_template))


@LOWERING.rule("div")
def _div(emit: Emitter, number: int, node: Node, args: list[Lanes]) -> Lanes:
    template = "(F32({0}) / F32({1}))"
    if len(args[1]) == 1 and is_number(args[1][0]) and float(args[1][0]):
        template = "({0} * " + repr(1.0 / float(args[1][0])) + ")"  # a division is a subroutine
    return lanewise(template, emit.lanes_of(number), args)


def is_number(expression: str) -> bool:
    """Whether an expression is a literal."""
    try:
        float(expression)
    except ValueError:
        return False
    return True


@LOWERING.rule("pow")
def _pow(emit: Emitter, number: int, node: Node, args: list[Lanes]) -> Lanes:
    exponent = node.attr("exponent")
    if exponent == int(exponent) and 1 <= abs(exponent) <= 4:
        product = " * ".join(["{0}"] * int(abs(exponent)))
        template = f"({product})" if exponent > 0 else f"(1.0 / F32({product}))"
    else:
        template = "math.pow(F32({0}), F32(" + repr(exponent) + "))"
    return lanewise(template, emit.lanes_of(number), args)


@LOWERING.rule("round_to")
def _round_to(emit: Emitter, number: int, node: Node, args: list[Lanes]) -> Lanes:
    stored = emit.storage_type(node.attr("dtype"))
    if stored is None:
        return args[0]
    return lanewise("F32({0}).to(" + stored + ").to(F32)", emit.lanes_of(number), args)


# ------------------------------------------------------------------------------- pairs, heads
def refuse_split(node: Node) -> None:
    """Raise unless the columns that a pair or group node looks at share a thread."""
    if node.op in ("group_sum", "ungroup"):
        raise NotLowerable(f"{node.op}: a group's columns lie in several threads")
    if node.attr("pairs") != "adjacent":
        raise NotLowerable(
            f"{node.op} of pairs {node.attr('pairs')!r}: only adjacent columns share a thread"
        )


@LOWERING.rule("unpack")
def _unpack(emit: Emitter, number: int, node: Node, args: list[Lanes]) -> Lanes:
    refuse_split(node)
    return (args[0][node.attr("member")],)


@LOWERING.rule("pack")
def _pack(emit: Emitter, number: int, node: Node, args: list[Lanes]) -> Lanes:
    refuse_split(node)
    return (args[0][0], args[1][0])


@LOWERING.rule("rotate")
def _rotate(emit: Emitter, number: int, node: Node, args: list[Lanes]) -> Lanes:
    refuse_split(node)
    if emit.lanes_of(number) != 2:
        raise NotLowerable("rotate of a value narrower than the accumulator")
    a, b = args[0]
    cos, sin, turns = emit.rotary(number)
    minus, plus = ("+", "-") if node.attr("inverse") else ("-", "+")
    first, second = f"({a} * {cos} {minus} {b} * {sin})", f"({b} * {cos} {plus} {a} * {sin})"
    if turns is None:
        return first, second
    return _select(f"{turns} > 0.5", first, a), _select(f"{turns} > 0.5", second, b)


@LOWERING.rule("group_sum", "ungroup")
def _groups(emit: Emitter, number: int, node: Node, args: list[Lanes]) -> Lanes:
    refuse_split(node)
    return ()


@LOWERING.rule("onehot")
def _onehot(emit: Emitter, number: int, node: Node, args: list[Lanes]) -> Lanes:
    return emit.onehot(number)


# --------------------------------------------------------------------------------- reductions
@LOWERING.rule(
    *("rowsum", "rowmax", "rowmean", "rowvar", "rowlse", "rowsoftmean", "select"),
    *("colsum", "colmax", "totalsum"),
)
def _reduction(emit: Emitter, number: int, node: Node, args: list[Lanes]) -> Lanes:
    emit.reduce(number, args)
    return ()


@LOWERING.rule("combine")
def _combine(emit: Emitter, number: int, node: Node, args: list[Lanes]) -> Lanes:
    raise NotLowerable("combine: partials are completed by a finalizer, not by an epilogue")
