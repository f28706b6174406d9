"""Reductions of a program as sinks of a QuACK epilogue.

A sum of a product hands over both factors where the form allows, for one fused multiply-add. What
a form has no place for is completed outside: NaNs of a maximum, sums of half-width columns.
"""

from __future__ import annotations

from typing import Protocol

from codetta.backends.cuda.forms import PACKED, PAIR, Partials
from codetta.backends.cuda.rules import Lanes, NotLowerable
from codetta.language.primitives import COL_REDUCTIONS, REDUCTIONS
from codetta.language.program import Program
from codetta.language.types import Kind
from codetta.language.values import Node


class Sinks(Protocol):
    """What this module asks of the pass over the nodes."""

    program: Program
    mode: str
    lanes: dict[int, Lanes]
    partials: list[Partials]

    def let(self, expression: str) -> str:
        """Name an expression."""

    def sink(
        self, key: str, fold: str, over: str, value: str, *, scaled: bool = False, operand: str = ""
    ) -> str:
        """Declare a sink that takes ``value``; returns its name."""

    def sink_name(self, key: str) -> str:
        """The name of the sink with this key, declared or not yet."""

    def masked(self, lanes: Lanes, over: str, node: int) -> Lanes:
        """The lanes of (a factor of) a node, zero outside of the matrix along the reduced axis."""


def reduce(low: Sinks, number: int, args: list[Lanes]) -> None:
    """Declare the sinks of a reduction node and how its partial follows from them."""
    node = low.program.nodes[number]
    source = low.program.nodes[node.args[0]].type
    if source.kind is not Kind.TILE:
        raise NotLowerable(f"{node.op} of a {source.kind.value}, which no tile holds")
    _REDUCE[node.op](low, number, node, args)


def _pairwise(low: Sinks, lanes: Lanes, identity: str) -> str:
    """What a sink takes in this form: both lanes in acc_pair, one elsewhere."""
    if low.mode != PAIR:
        return f"F32({lanes[0]})"
    second = lanes[1] if len(lanes) > 1 else identity
    return f"(F32({lanes[0]}), F32({second}))"


def _factors(low: Sinks, whole: int, over: str) -> str:
    """Both factors of the product ``whole``, which the sink folds with one multiply-add."""
    product = low.program.nodes[whole]
    first, second = (low.masked(low.lanes[a], over, whole)[0] for a in product.args)
    return f"(F32({first}), F32({second}))"


def _sum_over_n(low: Sinks, number: int, node: Node, args: list[Lanes]) -> None:
    name = f"{node.op}{number}"
    how = "rows" if node.op == "totalsum" else "same"
    product = low.program.nodes[node.args[0]]
    if product.op == "mul" and low.mode != PAIR and len(args[0]) == 1:
        sink = low.sink(name, "add", "n", _factors(low, node.args[0], "n"), scaled=True)
    else:
        lanes = args[0]
        if low.mode == PACKED and len(lanes) == 2:
            lanes = (low.let(f"({lanes[0]} + {lanes[1]})"),)
        value = _pairwise(low, low.masked(lanes, "n", node.args[0]), "0.0")
        sink = low.sink(name, "add", "n", value)
    low.partials.append(Partials(number, how, (sink,)))


def _sum_over_m(low: Sinks, number: int, node: Node, args: list[Lanes]) -> None:
    name = f"{node.op}{number}"
    product = low.program.nodes[node.args[0]]
    if product.op == "mul" and low.mode != PAIR and len(args[0]) == 1:
        sink = low.sink(name, "add", "m", _factors(low, node.args[0], "m"), scaled=True)
        low.partials.append(Partials(number, "same", (sink,)))
        return
    lanes = low.masked(args[0], "m", node.args[0])
    if low.mode == PACKED and len(lanes) == 2:
        names = tuple(low.sink(f"{name}_{i}", "add", "m", f"F32({x})") for i, x in enumerate(lanes))
        low.partials.append(Partials(number, "interleave", names))
        return
    sink = low.sink(name, "add", "m", _pairwise(low, lanes, "0.0"))
    half = low.mode == PAIR and len(lanes) == 1
    low.partials.append(Partials(number, "even" if half else "same", (sink,)))


def _maximum(low: Sinks, number: int, node: Node, args: list[Lanes]) -> None:
    lanes, over = args[0], "m" if node.op in COL_REDUCTIONS else "n"
    if low.mode == PACKED and len(lanes) == 2:
        raise NotLowerable(f"{node.op} of a value twice as wide as the accumulator")
    if over == "m" and low.mode == PAIR and len(lanes) == 1:
        raise NotLowerable("colmax of a value half as wide as the accumulator")
    name = f"{node.op}{number}"
    if over == "n":
        sink = low.sink(name, "maximum", over, _pairwise(low, lanes, lanes[0]))
        low.partials.append(Partials(number, "same", (sink,)))
        return
    nans = tuple(
        low.let(f"F32(cutlass.select_(F32({x}) != F32({x}), F32({x}), F32(0.0)))") for x in lanes
    )
    sinks = (
        low.sink(name, "max", over, _pairwise(low, lanes, lanes[0])),
        low.sink(
            f"{name}_nan", "add", over, _pairwise(low, low.masked(nans, over, node.args[0]), "0.0")
        ),
    )
    low.partials.append(Partials(number, "nan_max", sinks))


def _softmax(low: Sinks, number: int, node: Node, args: list[Lanes]) -> None:
    """(max, sum) of a value, and the payload's sum where a softmean needs it, kept once."""
    source = node.args[0]
    if low.mode == PACKED and len(args[0]) == 2:
        raise NotLowerable(f"{node.op} of a value twice as wide as the accumulator")
    if node.op == "rowsoftmean":
        if low.mode == PAIR:
            raise NotLowerable("a payload of log-sum-exp in a program that works on pairs")
        pair = f"(F32({args[0][0]}), F32({args[1][0]}))"
        sink = low.sink(f"softmean{number}", "softmean", "n", pair, scaled=True)
    else:
        payloads = [
            i
            for i in low.program.reductions
            if low.program.nodes[i].op == "rowsoftmean" and low.program.nodes[i].args[0] == source
        ]
        if payloads:
            sink = low.sink_name(f"softmean{payloads[0]}")
        else:
            value = _pairwise(low, args[0], "-INF")
            sink = low.sink(f"softmax{source}", "softmax", "n", value)
    low.partials.append(Partials(number, "same", (sink,)))


def _moments(low: Sinks, number: int, node: Node, args: list[Lanes]) -> None:
    if len(args[0]) != (2 if low.mode == PAIR else 1):
        raise NotLowerable(f"{node.op} of another width than the accumulator")
    sink = low.sink(f"moments{node.args[0]}", "moments", "n", _pairwise(low, args[0], ""))
    low.partials.append(Partials(number, "same", (sink,)))


def _select(low: Sinks, number: int, node: Node, args: list[Lanes]) -> None:
    if len(args[0]) != (2 if low.mode == PAIR else 1):
        raise NotLowerable("select in a value of another width than the accumulator")
    value = _pairwise(low, args[0], "")
    index = str(low.program.nodes[node.args[1]].attr("name"))
    sink = low.sink(f"select{number}", "select", "n", value, operand=index)
    low.partials.append(Partials(number, "same", (sink,)))


_REDUCE = {
    "rowsum": _sum_over_n,
    "totalsum": _sum_over_n,
    "colsum": _sum_over_m,
    "rowmax": _maximum,
    "colmax": _maximum,
    "rowlse": _softmax,
    "rowsoftmean": _softmax,
    "rowmean": _moments,
    "rowvar": _moments,
    "select": _select,
}
assert set(_REDUCE) == REDUCTIONS
