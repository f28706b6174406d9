"""Traced values and the tracer that records them.

A :class:`Value` stands for a whole array; arithmetic on it appends nodes to its tracer. The same
class serves an author's epilogue, the derivative rules and the builder of Plans, so that all three
read like the formula. Nodes are hash-consed: equal expressions are one node, which makes the
order of the author's statements and the names of local variables irrelevant.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

from codetta.errors import (
    CodettaError,
    DataDependentBranch,
    ForeignFunction,
    ForeignValue,
    NotIterable,
)
from codetta.language import shapes  # noqa: F401  (registers the SHAPE rules)
from codetta.language.primitives import PRIMITIVES, SHAPE
from codetta.language.types import Kind, Type

AttrValue = str | int | float | bool | Fraction
_PACKAGE = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True, slots=True)
class Node:
    """One operation: primitive, argument node numbers, attributes, result type."""

    op: str
    args: tuple[int, ...]
    attrs: tuple[tuple[str, AttrValue], ...]
    type: Type

    def attr(self, name: str) -> Any:
        return dict(self.attrs)[name]


class Tracer:
    """Records nodes; subclasses decide how leaves are typed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[Node] = []
        self.lines: dict[int, str] = {}
        self._seen: dict[tuple[Any, ...], int] = {}

    # ---- leaves
    def leaf(self, op: str, type_: Type, **attrs: AttrValue) -> Value:
        return self.append(Node(op, (), tuple(attrs.items()), type_))

    def const(self, number: float) -> Value:
        return self.leaf("const", Type(Kind.SCALAR), value=float(number))

    # ---- operations
    def emit(self, op: str, *args: Value | float, **attrs: AttrValue) -> Value:
        """Append the operation ``op``; errors of its SHAPE rule get the author's line."""
        values = tuple(self.lift(a, op) for a in args)
        try:
            result = SHAPE[op](op, attrs, *(v.type for v in values))
        except CodettaError as error:
            raise _located(error) from None
        return self.simplified(
            Node(op, tuple(v.id for v in values), tuple(attrs.items()), self.typed(result))
        )

    def typed(self, result: Type) -> Type:
        """Hook: how a derived type is recorded (Plans forget the path)."""
        return result

    def lift(self, x: Any, op: str) -> Value:
        if isinstance(x, Value):
            if x.tracer is not self:
                raise _located(ForeignValue(given=f"a value of the trace of {x.tracer.name!r}"))
            return x
        if isinstance(x, bool) or not isinstance(x, int | float | Fraction):
            raise _located(ForeignValue(given=f"a {type(x).__name__}"))
        return self.const(float(x))

    def append(self, node: Node) -> Value:
        key = (node.op, node.args, node.attrs)
        if key not in self._seen:
            self._seen[key] = len(self.nodes)
            where = author_line()
            if where:
                self.lines[len(self.nodes)] = where
            self.nodes.append(node)
        return Value(self, self._seen[key])

    def simplified(self, node: Node) -> Value:
        """Append ``node`` unless an identity, exact in floating point too, makes it redundant."""
        args = [self.nodes[i] for i in node.args]
        same = Value(self, node.args[0]) if node.args else None
        if same is not None and node.type == args[0].type:
            if node.op == "broadcast":
                return same
            if node.op in ("mul", "div") and _is_const(args[1], 1.0):
                return same
            if node.op == "round_to" and args[0].op == "round_to" and args[0].attrs == node.attrs:
                return same
        if node.op == "mul" and _is_const(args[0], 1.0) and node.type == args[1].type:
            return Value(self, node.args[1])
        if node.op == "neg" and args[0].op == "neg":
            return Value(self, args[0].args[0])
        if (
            node.op == "unpack"
            and args[0].op == "pack"
            and args[0].attr("pairs") == node.attr("pairs")
        ):
            return self.same_type(args[0].args[node.attr("member")], node)
        if (
            node.op == "pack"
            and args[0].op == args[1].op == "unpack"
            and args[0].args == args[1].args
            and (args[0].attr("member"), args[1].attr("member")) == (0, 1)
            and args[0].attr("pairs") == args[1].attr("pairs") == node.attr("pairs")
        ):
            return self.same_type(args[0].args[0], node)
        if node.op == "add":
            merged = self.merged_packs(node, args)
            return self.append(node) if merged is None else merged
        return self.append(node)

    def merged_packs(self, node: Node, args: list[Node]) -> Value | None:
        """pack(a, 0) + pack(0, b) = pack(a, b), also behind an earlier summand."""
        left, right = args
        if left.op == "add" and right.op == "pack":
            inner = Node("add", (left.args[1], node.args[1]), (), node.type)
            merged = self.merged_packs(inner, [self.nodes[left.args[1]], right])
            if merged is not None:
                return Value(self, left.args[0]) + merged
        if left.op == right.op == "pack" and left.attrs == right.attrs:
            members = [_one_sided(self, a) for a in args]
            if set(members) == {0, 1}:
                first, second = args if members == [0, 1] else args[::-1]
                return self.append(
                    Node("pack", (first.args[0], second.args[1]), first.attrs, node.type)
                )
        return None

    def same_type(self, candidate: int, node: Node) -> Value:
        """The candidate if it has the type of ``node`` (a scalar may have been packed), else it."""
        if self.nodes[candidate].type == node.type:
            return Value(self, candidate)
        return self.append(node)


def _is_const(node: Node, number: float) -> bool:
    return node.op == "const" and node.attr("value") == number


def _one_sided(tracer: Tracer, pack: Node) -> int | None:
    """Which member a pack fills when the other one is the constant 0, else None."""
    zero = [_is_const(tracer.nodes[i], 0.0) for i in pack.args]
    return {(False, True): 0, (True, False): 1}.get((zero[0], zero[1]))


def _located(error: CodettaError) -> CodettaError:
    if error.where is not None:
        return error
    return type(error)(author_line(), **error.fields)


def author_line() -> str | None:
    """``file:line: source`` of the innermost frame outside this package, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE) and not file.startswith("<frozen"):
            source = linecache.getline(file, frame.f_lineno).strip()
            return f"{file}:{frame.f_lineno}: {source}".rstrip(": ")
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


class Value:
    """A symbolic array of an epilogue or a Plan. Supports arithmetic and comparisons."""

    __slots__ = ("id", "tracer")
    __array_ufunc__ = None  # numpy must not take Values apart element by element

    def __init__(self, tracer: Tracer, id: int) -> None:
        self.tracer, self.id = tracer, id

    @property
    def node(self) -> Node:
        return self.tracer.nodes[self.id]

    @property
    def type(self) -> Type:
        return self.node.type

    def _emit(self, op: str, *args: Any, **attrs: AttrValue) -> Value:
        return self.tracer.emit(op, *args, **attrs)

    def __add__(self, other: Any) -> Value:
        return self._emit("add", self, other)

    def __radd__(self, other: Any) -> Value:
        return self._emit("add", other, self)

    def __sub__(self, other: Any) -> Value:
        return self._emit("sub", self, other)

    def __rsub__(self, other: Any) -> Value:
        return self._emit("sub", other, self)

    def __mul__(self, other: Any) -> Value:
        return self._emit("mul", self, other)

    def __rmul__(self, other: Any) -> Value:
        return self._emit("mul", other, self)

    def __truediv__(self, other: Any) -> Value:
        return self._emit("div", self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return self._emit("div", other, self)

    def __neg__(self) -> Value:
        return self._emit("neg", self)

    def __abs__(self) -> Value:
        return self._emit("abs", self)

    def __pow__(self, exponent: Any) -> Value:
        from codetta.language.functions import pow as power

        return power(self, exponent)

    def __lt__(self, other: Any) -> Value:
        return self._emit("lt", self, other)

    def __le__(self, other: Any) -> Value:
        return self._emit("le", self, other)

    def __gt__(self, other: Any) -> Value:
        return self._emit("gt", self, other)

    def __ge__(self, other: Any) -> Value:
        return self._emit("ge", self, other)

    def __eq__(self, other: Any) -> Value:  # type: ignore[override]
        return self._emit("eq", self, other)

    def __ne__(self, other: Any) -> Value:  # type: ignore[override]
        return self._emit("ne", self, other)

    def __hash__(self) -> int:
        return hash((id(self.tracer), self.id))

    def __repr__(self) -> str:
        return f"<{self.type} %{self.id} = {self.node.op} of {self.tracer.name!r}>"

    # ---- what a traced value cannot do, each with its way out
    def __bool__(self) -> NoReturn:
        raise DataDependentBranch(author_line(), what="`if`, `and`, `or`, `not`, max() or min()")

    def __float__(self) -> NoReturn:
        raise DataDependentBranch(author_line(), what="float() or a function of the math module")

    def __int__(self) -> NoReturn:
        raise DataDependentBranch(author_line(), what="int() or an index")

    __index__ = __int__

    def __iter__(self) -> NoReturn:
        raise NotIterable(author_line(), what="unpacking, `for` or `in`")

    def __getitem__(self, item: Any) -> NoReturn:
        raise NotIterable(author_line(), what=f"[{item!r}]")

    def __len__(self) -> NoReturn:
        raise NotIterable(author_line(), what="len()")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise foreign(f"torch.{getattr(function, '__name__', function)}")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise foreign("numpy")


def foreign(function: str) -> ForeignFunction:
    short = function.rsplit(".", 1)[-1]
    fix = (
        f"codetta.language.{short}"
        if short in PRIMITIVES and PRIMITIVES[short].arity
        else "a function of codetta.language (dir(codetta.language) lists them)"
    )
    return ForeignFunction(author_line(), function=function, fix=fix)


def attrs_of(node: Node) -> Mapping[str, Any]:
    return dict(node.attrs)
