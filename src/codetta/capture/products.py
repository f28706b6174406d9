"""Contractions with parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from codetta.capture.arithmetic import aligned
from codetta.capture.forms import Form
from codetta.capture.rules import Unliftable, aten, rule

if TYPE_CHECKING:
    from codetta.capture.lens import Lens


# ------------------------------------------------------------------------------ contraction
#: N / K from which a weight is a head's: folding γ into it, or r into the gradient of its result,
#: moves far more bytes than it saves.
HEAD = 8


@rule(aten.mm.default)
def _mm(lens: Lens, result: Tensor, a: Tensor, b: Tensor) -> Any:
    left, right = lens.form(a), lens.matrix(b)
    if len(left.axes) != 2 or not left.ordered or len(left.features) != 1 or not left.tokens:
        raise Unliftable("a product whose left factor is not (tokens, features)")
    builder = lens.builder
    n, k = b.shape[1], b.shape[0]
    if n > HEAD * k:
        raise Unliftable(f"a head: a weight of {n} x {k} costs more to fold than that saves")
    w = right.value if right.transposed else builder.emit("transpose", right.value)
    value = builder.mm(left.value, builder._own(w).t())
    lens.multiplied[value.id] = result.dtype
    return Form(value, left.axes, left.tokens, (int(value.type.cols),))


@rule(aten.addmm.default)
def _addmm(
    lens: Lens, result: Tensor, bias: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1
) -> Any:
    if beta != 1 or alpha != 1:
        raise Unliftable("addmm with factors")
    product_form = _mm(lens, result, a, b)
    addend = lens.form(bias)
    return product_form.but(product_form.value + aligned(addend, product_form))
