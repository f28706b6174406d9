"""Views, casts, slices and concatenations: bookkeeping, but for columns taken or put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from codetta.capture.forms import ONE, Form, Matrix, Piece, Rotated, Swapped, Virtual, same, viewed
from codetta.capture.rules import Unliftable, aten, rule
from codetta.language.types import Kind

if TYPE_CHECKING:
    from codetta.capture.lens import Lens


# ------------------------------------------------------------------------------------ views
@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(lens: Lens, result: Tensor, x: Tensor, shape: Any) -> Any:
    form = lens.derived(x)
    if isinstance(form, Matrix | Virtual):
        raise Unliftable("a view of it")
    found = viewed(form, result.shape)
    if found is None:
        raise Unliftable("a view that mixes tokens and features")
    return found


@rule(
    aten.clone.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
)
def _same(lens: Lens, result: Tensor, x: Tensor, **ignored: Any) -> Any:
    return lens.derived(x)


@rule(aten._to_copy.default)
def _cast(lens: Lens, result: Tensor, x: Tensor, **ignored: Any) -> Any:
    if not (x.dtype.is_floating_point and result.dtype.is_floating_point):
        raise Unliftable("a cast from or to integers")
    if result.device != x.device:
        raise Unliftable("a copy to another device")
    if x.ndim == 2 and lens.is_parameter_matrix(x):
        return lens.matrix(x)  # as autocast does with weights
    form = lens.derived(x)
    if isinstance(form, Form) and result.dtype.itemsize > x.dtype.itemsize:
        return lens.rounded(x, form)  # what is computed with more digits now sees the stored value
    return form


@rule(aten.expand.default)
def _expand(lens: Lens, result: Tensor, x: Tensor, shape: Any, implicit: bool = False) -> Any:
    form = lens.derived(x)
    if not isinstance(form, Form):
        raise Unliftable("an expansion of it")
    extra = result.ndim - x.ndim
    if not all(same(a, b) for a, b in zip(result.shape[extra:], x.shape, strict=True)):
        raise Unliftable("an expansion")
    if not all(same(a, 1) for a in result.shape[:extra]):
        raise Unliftable("an expansion")
    return form.but(form.value, [ONE] * extra + list(form.axes))


@rule(aten.unsqueeze.default)
def _unsqueeze(lens: Lens, result: Tensor, x: Tensor, dim: int) -> Any:
    form = _plain(lens, x)
    axes = list(form.axes)
    axes.insert(dim % result.ndim, ONE)
    return form.but(form.value, axes)


@rule(aten.squeeze.dim)
def _squeeze(lens: Lens, result: Tensor, x: Tensor, dim: int) -> Any:
    form = _plain(lens, x)
    axes = list(form.axes)
    if result.ndim < x.ndim:
        del axes[dim % x.ndim]
    return form.but(form.value, axes)


@rule(aten.transpose.int)
def _transpose(lens: Lens, result: Tensor, x: Tensor, first: int, second: int) -> Any:
    if x.ndim == 2 and lens.is_parameter_matrix(x):
        return _t(lens, result, x)
    form = _plain(lens, x)
    axes = list(form.axes)
    i, j = first % x.ndim, second % x.ndim
    axes[i], axes[j] = axes[j], axes[i]
    return form.but(form.value, axes)


@rule(aten.permute.default)
def _permute(lens: Lens, result: Tensor, x: Tensor, dims: Sequence[int]) -> Any:
    form = _plain(lens, x)
    return form.but(form.value, [form.axes[d % x.ndim] for d in dims])


@rule(aten.t.default)
def _t(lens: Lens, result: Tensor, x: Tensor) -> Any:
    if lens.is_parameter_matrix(x):
        matrix = lens.matrix(x)
        return Matrix(matrix.value, not matrix.transposed)
    raise Unliftable("a transpose of an activation")


def _plain(lens: Lens, x: Tensor) -> Form:
    form = lens.derived(x)
    if not isinstance(form, Form):
        raise Unliftable("a view of it")
    return form


# -------------------------------------------------------------------- slices, concatenations
@rule(aten.slice.Tensor)
def _slice(
    lens: Lens, result: Tensor, x: Tensor, dim: int = 0, start: Any = None, end: Any = None,
    step: int = 1,
) -> Any:  # fmt: skip
    form = lens.derived(x)
    dim = dim % x.ndim
    if same(result.shape[dim], x.shape[dim]):
        return form
    if step != 1 or not isinstance(form, Form):
        raise Unliftable("a slice of it")
    _over_columns(form, dim)
    first = int(start or 0)
    first = first + int(x.shape[dim]) if first < 0 else first
    return _columns(form, dim, first, first + int(result.shape[dim]))


def _over_columns(form: Form, dim: int) -> None:
    if form.axes[dim].role != "n":  # asked first: the number of tokens may be a symbol
        raise Unliftable("a slice of the tokens")


def _columns(form: Form, dim: int, start: int, stop: int) -> Form | Piece:
    axis = form.axes[dim]
    if len(form.features) == 1 and form.value.type.kind is Kind.TILE:
        value = form.value.tracer.emit("slice_cols", form.value, start=start, stop=stop)
        return Form(value, form.axes, form.tokens, (stop - start,))
    if axis.index == len(form.features) - 1 and dim == len(form.axes) - 1:
        return Piece(form, start, stop)
    raise Unliftable("a slice of the heads")


@rule(aten.split.Tensor, aten.split_with_sizes.default)
def _split(lens: Lens, result: Any, x: Tensor, sizes: Any, dim: int = 0) -> Any:
    form = lens.derived(x)
    if not isinstance(form, Form):
        raise Unliftable("a split of it")
    _over_columns(form, dim % x.ndim)
    found, start = [], 0
    for part in result:
        stop = start + int(part.shape[dim])
        found.append(_columns(form, dim % x.ndim, start, stop))
        start = stop
    return found


@rule(aten.cat.default)
def _cat(lens: Lens, result: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    tensors = [x for x in tensors if not same(x.numel(), 0)]
    if len(tensors) == 1:
        found = lens.known.get(id(tensors[0]))
        if isinstance(found, Form):
            return found
    forms = [lens.known.get(id(x)) for x in tensors]
    if dim % result.ndim != result.ndim - 1:
        raise Unliftable("a concatenation of tokens")
    joined = _joined(lens, forms)
    if joined is not None:
        return joined
    if len(tensors) == 2 and tensors[0] is tensors[1]:
        raise Unliftable("a repetition")
    plain = [lens.form(x) for x in tensors]
    if any(len(x.features) != 1 or x.axes != plain[0].axes for x in plain):
        raise Unliftable("a concatenation of these")
    if any(x.value.type.kind is not Kind.TILE for x in plain):
        raise Unliftable("a concatenation of vectors")
    value = plain[0].value.tracer.emit("cat_cols", *(x.value for x in plain))
    return Form(value, plain[0].axes, plain[0].tokens, (int(value.type.cols),))


def _joined(lens: Lens, forms: Sequence[Any]) -> Swapped | Form | None:
    """Halves of a rotation, or its rotated and passing columns, put together."""
    if len(forms) != 2:
        return None
    a, b = forms
    if isinstance(a, Piece) and isinstance(b, Piece) and a.base == b.base:
        turned = a.negative and not b.negative and b.stop == a.start
        if turned and a.stop - a.start == b.stop - b.start:
            return Swapped(a.base, b.start, a.stop)
    if isinstance(a, Rotated) and isinstance(b, Piece) and a.base == b.base and not b.negative:
        rest = (b.start, b.stop) == (a.stop, a.base.features[-1])
        if a.start == 0 and rest:
            return lens.rotation(a)
    return None
