"""The primitives: each is named once here and has one entry in each table of rules.

| table      | module           | an entry answers                                             |
|------------|------------------|--------------------------------------------------------------|
| SHAPE      | shapes.py        | which kinds and widths may meet, and what comes out          |
| MEANING    | meaning.py       | the value, in plain PyTorch (the executable specification)   |
| REDUCTION  | meaning.py       | partial per tile and combine, for the reductions             |
| DERIVATIVE | derivatives.py   | cotangents of the arguments, in the same primitives          |
| COST       | costs.py         | operations per element                                       |

Adding a primitive is one line here and one entry per table; a missing entry is a
:class:`~codetta.errors.MissingRule` naming primitive and table, and a test walks all pairs.
A backend adds a table of its own (lowering) in the same way.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from codetta.errors import MissingRule


class Family(enum.Enum):
    """The five families of the language, and the leaves."""

    LEAF = "leaf"
    MAP = "elementwise or pairwise map"
    LOAD = "vector or tile load"
    REDUCTION = "tile reduction"
    STATEFUL = "stateful transform"


@dataclass(frozen=True, slots=True)
class Primitive:
    """Name, family, number of value arguments (-1: any), attribute names and the formula."""

    name: str
    family: Family
    arity: int
    attrs: tuple[str, ...]
    formula: str


def _map(name: str, arity: int, formula: str, *attrs: str) -> Primitive:
    return Primitive(name, Family.MAP, arity, attrs, formula)


PRIMITIVES: dict[str, Primitive] = {
    p.name: p
    for p in (
        Primitive("acc", Family.LEAF, 0, (), "the accumulator tile, a b"),
        Primitive("const", Family.LEAF, 0, ("value",), "a number"),
        Primitive("extent", Family.LEAF, 0, ("axis", "width"), "number of rows M or columns w N"),
        Primitive("operand", Family.LOAD, 0, ("name",), "a declared operand"),
        _map("neg", 1, "-x"),
        _map("abs", 1, "|x|"),
        _map("exp", 1, "e^x"),
        _map("log", 1, "ln x"),
        _map("sqrt", 1, "x^(1/2)"),
        _map("rsqrt", 1, "x^(-1/2)"),
        _map("sin", 1, "sin x"),
        _map("cos", 1, "cos x"),
        _map("tanh", 1, "tanh x"),
        _map("erf", 1, "erf x"),
        _map("sigmoid", 1, "1 / (1 + e^-x)"),
        _map("relu", 1, "max(x, 0), derivative 0 at 0"),
        _map("pow", 1, "x^n for a constant n", "exponent"),
        _map("round_to", 1, "x rounded to a storage dtype and back", "dtype"),
        _map("add", 2, "x + y"),
        _map("sub", 2, "x - y"),
        _map("mul", 2, "x y"),
        _map("div", 2, "x / y"),
        _map("maximum", 2, "max(x, y)"),
        _map("minimum", 2, "min(x, y)"),
        _map("lt", 2, "x < y"),
        _map("le", 2, "x <= y"),
        _map("gt", 2, "x > y"),
        _map("ge", 2, "x >= y"),
        _map("eq", 2, "x = y"),
        _map("ne", 2, "x != y"),
        _map("where", 3, "x if c else y"),
        _map("broadcast", 1, "x repeated over the missing axes", "axes", "width", "path"),
        _map("unpack", 1, "first (0) or second (1) member of each pair", "member", "pairs"),
        _map("pack", 2, "pairs (x, y)", "pairs"),
        _map(
            "rotate",
            2,
            "(a cos - b sin, a sin + b cos) for the pairs (a, b) of the first `rotary_dim` columns "
            "of each of the first `heads` heads; other columns pass (inverse: -sin)",
            "head_dim",
            "rotary_dim",
            "heads",
            "pairs",
            "inverse",
        ),
        Primitive("group_sum", Family.STATEFUL, 1, ("size",), "sum over each group of columns"),
        Primitive("ungroup", Family.STATEFUL, 1, ("size",), "each group's value, for its columns"),
        Primitive("onehot", Family.STATEFUL, 1, ("width", "path"), "1 at column index[m], else 0"),
        Primitive("select", Family.STATEFUL, 2, (), "x[m, index[m]], 0 if out of range"),
        Primitive("rowlse", Family.STATEFUL, 1, (), "log sum_n e^x[m, n]"),
        Primitive("rowsoftmean", Family.STATEFUL, 2, (), "sum_n softmax(x)[m, n] p[m, n]"),
        Primitive(
            "combine",
            Family.STATEFUL,
            -1,
            ("reduction", "width", "path"),
            "a reduction completed from its partials, one operand per component",
        ),
        Primitive("rowsum", Family.REDUCTION, 1, (), "sum_n x[m, n]"),
        Primitive("rowmax", Family.REDUCTION, 1, (), "max_n x[m, n]"),
        Primitive("rowmean", Family.REDUCTION, 1, (), "mean_n x[m, n] (Chan)"),
        Primitive("rowvar", Family.REDUCTION, 1, (), "mean_n (x[m, n] - mean)^2 (Chan)"),
        Primitive("colsum", Family.REDUCTION, 1, (), "sum_m x[m, n]"),
        Primitive("colmax", Family.REDUCTION, 1, (), "max_m x[m, n]"),
        Primitive("totalsum", Family.REDUCTION, 1, (), "sum_mn x[m, n]"),
    )
}

ROW_REDUCTIONS = frozenset(
    {"rowsum", "rowmax", "rowmean", "rowvar", "rowlse", "rowsoftmean", "select"}
)
COL_REDUCTIONS = frozenset({"colsum", "colmax"})
REDUCTIONS = ROW_REDUCTIONS | COL_REDUCTIONS | {"totalsum"}
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})

R = TypeVar("R")


class Table(Generic[R]):
    """One kind of rule for every primitive. Reading a missing entry raises MissingRule."""

    def __init__(self, name: str, module: str, covers: Callable[[Primitive], bool]) -> None:
        self.name, self.module, self._covers = name, module, covers
        self._rules: dict[str, R] = {}

    def rule(self, *names: str) -> Callable[[R], R]:
        """Register one rule for the named primitives (decorator)."""

        def register(rule: R) -> R:
            for name in names:
                assert name in PRIMITIVES, name
                assert name not in self._rules, f"{self.name} already has a rule for {name}"
                self._rules[name] = rule
            return rule

        return register

    def __getitem__(self, name: str) -> R:
        try:
            return self._rules[name]
        except KeyError:
            raise MissingRule(primitive=name, table=self.name, module=self.module) from None

    def __contains__(self, name: str) -> bool:
        return name in self._rules

    def missing(self) -> Iterator[str]:
        """Primitives this table should cover and does not (empty in a released version)."""
        return (p.name for p in PRIMITIVES.values() if self._covers(p) and p.name not in self)


def _computed(p: Primitive) -> bool:
    return p.family is not Family.LEAF and p.name != "operand"


SHAPE: Table[Callable[..., Any]] = Table("SHAPE", "codetta.language.shapes", _computed)
MEANING: Table[Callable[..., Any]] = Table(
    "MEANING", "codetta.language.meaning", lambda p: _computed(p) and p.name not in REDUCTIONS
)
REDUCTION: Table[Any] = Table(
    "REDUCTION", "codetta.language.meaning", lambda p: p.name in REDUCTIONS
)
DERIVATIVE: Table[Callable[..., Any]] = Table(
    "DERIVATIVE", "codetta.language.derivatives", _computed
)
COST: Table[Any] = Table("COST", "codetta.language.costs", _computed)
