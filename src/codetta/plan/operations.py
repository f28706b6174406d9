"""Operations of Plans beyond the language: contractions, weight layouts, slices, opaque nodes.

The elementwise and reducing operations of a Plan are the language's own primitives; only what no
epilogue can do is added, again as one entry with shape, meaning and derivative: contractions,
columns of activations and opaque functions here, layouts of parameters in
:mod:`codetta.plan.layouts`. Contractions come in the three layouts that differentiation closes
over, so an (M, N) array is never transposed:

    nt: a bᵀ (forward, b in nn.Linear layout)    nn: a b (dgrad)    tn: aᵀ b (wgrad)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from codetta.errors import MissingRule, PlanShape
from codetta.language.types import Kind, Type
from codetta.language.values import Value

Attrs = Mapping[str, Any]
LAYOUTS = ("nt", "nn", "tn")


@dataclass(frozen=True)
class Operation:
    """Rules of one Plan operation.

    Attributes:
        shape: (plan name, attributes, argument types) -> result type; raises PlanShape.
        meaning: (context, attributes, tensors) -> tensor.
        derivative: (cotangent, result, attributes, arguments) -> cotangents.
        view: the result shares its argument's memory, so it costs nothing.
    """

    shape: Callable[..., Type]
    meaning: Callable[..., Tensor]
    derivative: Callable[..., tuple[Value | None, ...]]
    view: bool = False


OPERATIONS: dict[str, Operation] = {}


def operation(name: str) -> Operation:
    """Rules of a Plan operation; MissingRule if there is none."""
    try:
        return OPERATIONS[name]
    except KeyError:
        raise MissingRule(
            primitive=name, table="OPERATIONS", module="codetta.plan.operations"
        ) from None


def misfit(plan: str, op: str, types: tuple[Type, ...], reason: str) -> PlanShape:
    sizes = ", ".join(size(t) for t in types)
    return PlanShape(op=op, plan=plan, given=f"operands of sizes {sizes}", reason=reason)


def size(t: Type) -> str:
    """(rows, columns) of a Plan value as text."""
    return f"({t.rows if t.has_rows else 1}, {t.cols if t.has_cols else 1})"


def check_tiles(plan: str, op: str, types: tuple[Type, ...]) -> None:
    if any(t.kind is not Kind.TILE for t in types):
        raise misfit(plan, op, types, "it takes matrices")


def matrix(rows: int | str, cols: int | Fraction) -> Type:
    return Type(Kind.TILE, cols=Fraction(cols), rows=rows)


# ------------------------------------------------------------------------------ contraction
def _mm_shape(plan: str, attrs: Attrs, a: Type, b: Type) -> Type:
    check_tiles(plan, "mm", (a, b))
    layout = attrs["layout"]
    left = a.rows if layout == "tn" else a.cols
    right = b.cols if layout == "nt" else b.rows
    if left != right:
        raise misfit(plan, f"mm[{layout}]", (a, b), f"{left} is contracted with {right}")
    if layout == "nt":
        return matrix(a.rows, Fraction(b.rows))
    return matrix(a.rows if layout == "nn" else int(a.cols), b.cols)


def contract(layout: str, a: Tensor, b: Tensor) -> Tensor:
    """The contraction in one of the three layouts."""
    return a @ b.mT if layout == "nt" else a @ b if layout == "nn" else a.mT @ b


def _mm_derivative(d: Value, y: Value, attrs: Attrs, a: Value, b: Value) -> tuple[Value, Value]:
    def mm(layout: str, p: Value, q: Value) -> Value:
        return d.tracer.emit("mm", p, q, layout=layout)

    if attrs["layout"] == "nt":
        return mm("nn", d, b), mm("tn", d, a)
    if attrs["layout"] == "nn":
        return mm("nt", d, b), mm("tn", a, d)
    return mm("nt", b, d), mm("nn", a, d)


OPERATIONS["mm"] = Operation(
    _mm_shape, lambda ctx, attrs, a, b: contract(attrs["layout"], a, b), _mm_derivative
)


# ------------------------------------------------------------------- columns of activations
def _cat_cols_shape(plan: str, attrs: Attrs, *types: Type) -> Type:
    check_tiles(plan, "cat_cols", types)
    if len({t.rows for t in types}) != 1:
        raise misfit(plan, "cat_cols", types, "the numbers of rows differ")
    return matrix(types[0].rows, sum((t.cols for t in types), Fraction(0)))


def _cat_cols_derivative(d: Value, y: Value, attrs: Attrs, *xs: Value) -> tuple[Value, ...]:
    parts, start = [], 0
    for x in xs:
        stop = start + int(x.type.cols)
        parts.append(d.tracer.emit("slice_cols", d, start=start, stop=stop))
        start = stop
    return tuple(parts)


OPERATIONS["cat_cols"] = Operation(
    _cat_cols_shape, lambda ctx, attrs, *xs: torch.cat(xs, dim=1), _cat_cols_derivative
)


def _slice_cols_shape(plan: str, attrs: Attrs, x: Type) -> Type:
    check_tiles(plan, "slice_cols", (x,))
    if not 0 <= attrs["start"] <= attrs["stop"] <= x.cols:
        raise misfit(plan, "slice_cols", (x,), f"{attrs['start']}:{attrs['stop']} is out of range")
    return matrix(x.rows, attrs["stop"] - attrs["start"])


OPERATIONS["slice_cols"] = Operation(
    _slice_cols_shape,
    lambda ctx, attrs, x: x[:, attrs["start"] : attrs["stop"]],
    lambda d, y, attrs, x: (
        d.tracer.emit("pad_cols", d, start=attrs["start"], total=int(x.type.cols)),
    ),
    view=True,
)
OPERATIONS["pad_cols"] = Operation(
    lambda plan, attrs, x: matrix(x.rows, attrs["total"]),
    lambda ctx, attrs, x: torch.nn.functional.pad(
        x, (attrs["start"], attrs["total"] - attrs["start"] - x.shape[1])
    ),
    lambda d, y, attrs, x: (
        d.tracer.emit(
            "slice_cols", d, start=attrs["start"], stop=attrs["start"] + int(x.type.cols)
        ),
    ),
)


# --------------------------------------------------------------------------- opaque functions
@dataclass(frozen=True)
class Opaque:
    """A function the algebra does not look into, such as attention.

    Attributes:
        forward: tensors -> tensor (M, cols).
        backward: (cotangent, result, tensors) -> cotangents.
        cols: argument column counts -> the result's.
    """

    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, ...]]
    cols: Callable[..., int]


OPAQUE: dict[str, Opaque] = {}


def _opaque_shape(plan: str, attrs: Attrs, *types: Type) -> Type:
    check_tiles(plan, attrs["name"], types)
    return matrix(types[0].rows, OPAQUE[attrs["name"]].cols(*(int(t.cols) for t in types)))


OPERATIONS["opaque"] = Operation(
    _opaque_shape,
    lambda ctx, attrs, *xs: OPAQUE[attrs["name"]].forward(*xs),
    lambda d, y, attrs, *xs: tuple(
        d.tracer.emit("opaque_grad", d, y, *xs, name=attrs["name"], argument=i)
        for i in range(len(xs))
    ),
)
OPERATIONS["opaque_grad"] = Operation(
    lambda plan, attrs, d, y, *types: types[attrs["argument"]],
    lambda ctx, attrs, d, y, *xs: OPAQUE[attrs["name"]].backward(d, y, *xs)[attrs["argument"]],
    lambda d, y, attrs, *xs: (None,) * len(xs),
)
