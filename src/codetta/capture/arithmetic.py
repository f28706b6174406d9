"""Pointwise functions and reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from codetta.capture.forms import ONE, Axis, Form, Piece, same
from codetta.capture.rotary import rotated, turned
from codetta.capture.rules import Unliftable, aten, rule
from codetta.language import functions as f
from codetta.language.types import Kind
from codetta.language.values import Value

if TYPE_CHECKING:
    from codetta.capture.lens import Lens


# ------------------------------------------------------------------------------ elementwise
def elementwise(lens: Lens, result: Tensor, function: Callable[..., Value], *args: Any) -> Form:
    """A pointwise function of tensors and numbers."""
    if not all(isinstance(a, Tensor | int | float) for a in args):
        raise Unliftable("a number that is known only when it runs")
    forms = [lens.form(a) if isinstance(a, Tensor) else a for a in args]
    frame = frame_of(lens, [x for x in forms if isinstance(x, Form)], result)
    values = [aligned(x, frame) if isinstance(x, Form) else x for x in forms]
    return frame.but(function(*values))


def frame_of(lens: Lens, forms: Sequence[Form], result: Tensor) -> Form:
    """The form whose axes the result has: the one with all of the others' axes."""
    if not forms:
        raise Unliftable("no tensor that depends on the activations")
    best = max(forms, key=lambda x: (len(x.tokens) + len(x.features), len(x.axes)))
    axes = [ONE] * (result.ndim - len(best.axes)) + list(best.axes)
    for x in forms:
        if x is not best and x.tokens and best.tokens and not _equal(x.tokens, best.tokens):
            raise Unliftable("its operands differ in their token axes")
    if not best.features:  # a column meets a row: neither has all axes
        row = max(forms, key=lambda x: len(x.features))
        if row.features:
            raise Unliftable("an outer product of a column and a row")
    return Form(best.value, tuple(axes), best.tokens, best.features)


def _equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def aligned(x: Form, frame: Form) -> Value:
    """x's value, broadcast over the feature axes it lacks where the language does not do it."""
    missing = len(frame.axes) - len(x.axes)
    pairs = list(zip(x.axes, frame.axes[missing:], strict=True))
    where: dict[int, int] = {}
    for mine, theirs in pairs:
        if not mine.role:
            continue
        if mine.role != theirs.role or (mine.role == "m" and mine.index != theirs.index):
            raise Unliftable("its operands' axes do not match")
        if mine.role == "n":
            where[mine.index] = theirs.index
    if x.tokens and not _equal(x.tokens, frame.tokens):
        raise Unliftable("its operands differ in their token axes")
    if not x.features or x.features == frame.features:
        if x.features and any(k != v for k, v in where.items()):
            raise Unliftable("its operands' feature axes are in another order")
        return x.value
    if len(frame.features) != 2 or len(x.features) != 1:
        raise Unliftable("a broadcast over these feature axes")
    heads, size = frame.features
    if where == {0: 0} and x.features == (heads,):  # one value per head
        if x.value.type.kind is not Kind.TILE:
            raise Unliftable("a row with one value per head")
        return f.ungroup(x.value, size)
    if where == {0: 1} and x.features == (size,) and x.value.type.kind is Kind.ROW:
        column = x.value.tracer.emit("to_col", x.value)
        stacked = x.value.tracer.emit("stack_vectors", *([column] * heads))
        return x.value.tracer.emit("to_row", stacked)
    raise Unliftable("a broadcast over these feature axes")


def _pointwise(function: Callable[..., Value], *ops: Any) -> None:
    def apply(lens: Lens, result: Tensor, *args: Any) -> Any:
        return elementwise(lens, result, function, *args)

    rule(*ops)(apply)


_pointwise(f.abs, aten.abs.default)
_pointwise(f.exp, aten.exp.default)
_pointwise(f.log, aten.log.default)
_pointwise(f.sqrt, aten.sqrt.default)
_pointwise(f.rsqrt, aten.rsqrt.default)
_pointwise(f.tanh, aten.tanh.default)
_pointwise(f.erf, aten.erf.default)
_pointwise(f.sigmoid, aten.sigmoid.default)
_pointwise(f.relu, aten.relu.default)
_pointwise(f.silu, aten.silu.default)
_pointwise(lambda x: 1.0 / x, aten.reciprocal.default)
_pointwise(lambda x, y: x / y, aten.div.Tensor, aten.div.Scalar)
_pointwise(f.maximum, aten.maximum.default)
_pointwise(f.minimum, aten.minimum.default)
_pointwise(lambda x: x * x, aten.square.default)


@rule(aten.gelu.default)
def _gelu(lens: Lens, result: Tensor, x: Tensor, approximate: str = "none") -> Any:
    return elementwise(lens, result, lambda v: f.gelu(v, approximate), x)


@rule(aten.pow.Tensor_Scalar)
def _pow(lens: Lens, result: Tensor, x: Tensor, exponent: float) -> Any:
    if exponent == 2:
        return elementwise(lens, result, lambda v: v * v, x)
    return elementwise(lens, result, lambda v: f.pow(v, float(exponent)), x)


@rule(aten.mul.Tensor, aten.mul.Scalar)
def _mul(lens: Lens, result: Tensor, x: Any, y: Any) -> Any:
    for a, b in ((x, y), (y, x)):
        found = turned(lens, a, b)
        if found is not None:
            return found
    return elementwise(lens, result, lambda a, b: a * b, x, y)


@rule(aten.add.Tensor, aten.add.Scalar)
def _add(lens: Lens, result: Tensor, x: Any, y: Any, alpha: float = 1) -> Any:
    found = rotated(lens, x, y) if alpha == 1 else None
    if found is not None:
        return found
    return elementwise(lens, result, lambda a, b: a + (b if alpha == 1 else b * alpha), x, y)


@rule(aten.sub.Tensor, aten.sub.Scalar)
def _sub(lens: Lens, result: Tensor, x: Any, y: Any, alpha: float = 1) -> Any:
    return elementwise(lens, result, lambda a, b: a - (b if alpha == 1 else b * alpha), x, y)


@rule(aten.rsub.Scalar)
def _rsub(lens: Lens, result: Tensor, x: Any, y: Any, alpha: float = 1) -> Any:
    return elementwise(lens, result, lambda a: y - a * alpha, x)


@rule(aten.neg.default)
def _neg(lens: Lens, result: Tensor, x: Tensor) -> Any:
    form = lens.known.get(id(x))
    if isinstance(form, Piece):
        return Piece(form.base, form.start, form.stop, not form.negative)
    return elementwise(lens, result, lambda v: -v, x)


# ------------------------------------------------------------------------------- reductions
def reduced(lens: Lens, x: Tensor, dim: Any, keepdim: bool) -> tuple[Form, str, tuple[Axis, ...]]:
    """The form, 'row' or 'group', and the result's axes, for a reduction over ``dim``."""
    form = lens.form(x)
    dims = list(range(x.ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    over = sorted(d % x.ndim for d in dims)
    roles = [form.axes[d] for d in over]
    if any(a.role == "m" for a in roles):
        raise Unliftable("a reduction over tokens")
    found = sorted(a.index for a in roles if a.role)
    axes = tuple(
        ONE if i in over else a for i, a in enumerate(form.axes) if keepdim or i not in over
    )
    if not found:
        raise Unliftable("a reduction over nothing")
    if found == list(range(len(form.features))):
        if form.value.type.kind is not Kind.TILE:
            raise Unliftable("a reduction of a vector")
        return form, "row", axes
    if len(form.features) == 2 and found == [1]:
        return form, "group", axes
    raise Unliftable("a reduction over some of the feature axes")


@rule(aten.sum.dim_IntList)
def _sum(
    lens: Lens, result: Tensor, x: Tensor, dim: Any, keepdim: bool = False, dtype: Any = None
) -> Any:
    form, kind, axes = reduced(lens, x, dim, keepdim)
    if kind == "row":
        return Form(f.rowsum(form.value), axes, form.tokens)
    return Form(f.group_sum(form.value, form.features[1]), axes, form.tokens, form.features[:1])


@rule(aten.mean.dim)
def _mean(
    lens: Lens, result: Tensor, x: Tensor, dim: Any, keepdim: bool = False, dtype: Any = None
) -> Any:
    form, kind, axes = reduced(lens, x, dim, keepdim)
    if kind == "row":
        return Form(f.rowsum(form.value) / f.columns(form.value), axes, form.tokens)
    size = form.features[1]
    mean = f.group_sum(form.value, size) * (1.0 / size)
    return Form(mean, axes, form.tokens, form.features[:1])


@rule(aten.amax.default)
def _amax(lens: Lens, result: Tensor, x: Tensor, dim: Any = (), keepdim: bool = False) -> Any:
    form, kind, axes = reduced(lens, x, list(dim) or None, keepdim)
    if kind != "row":
        raise Unliftable("a maximum per group")
    return Form(f.rowmax(form.value), axes, form.tokens)


@rule(aten.native_layer_norm.default)
def _layer_norm(
    lens: Lens,
    result: Any,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Any:
    form = lens.form(x)
    if len(shape) != 1 or form.features != (shape[0],):
        raise Unliftable("a layer norm over several axes")
    x_value = form.value
    mean, variance = f.moments(x_value)
    normed = (x_value - mean) * f.rsqrt(variance + eps)
    if weight is not None:
        normed = normed * lens.form(weight).value
    if bias is not None:
        normed = normed + lens.form(bias).value
    column = tuple(a if a.role == "m" else ONE for a in form.axes)
    rstd = f.rsqrt(variance + eps)
    return [
        form.but(normed),
        Form(mean, column, form.tokens),
        Form(rstd, column, form.tokens),
    ]


@rule(aten._fused_rms_norm.default)
def _rms_norm(
    lens: Lens, result: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: Any
) -> Any:
    form = lens.form(x)
    if len(shape) != 1 or form.features != (shape[0],):
        raise Unliftable("an RMS norm over several axes")
    value = form.value
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = f.rsqrt(f.rowsum(value * value) / f.columns(value) + eps)
    normed = value * rstd
    if weight is not None:
        normed = normed * lens.form(weight).value
    column = tuple(a if a.role == "m" else ONE for a in form.axes)
    return [form.but(normed), Form(rstd, column, form.tokens)]
