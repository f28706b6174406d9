"""What an author writes: the functions of the epilogue language.

Elementwise: ``abs exp log sqrt rsqrt sin cos tanh erf sigmoid relu pow maximum minimum where``,
and the compositions ``silu gelu softcap square``. Pairs and heads: ``unpack pack rotate group_sum
group_mean ungroup``. Reductions: ``rowsum rowmean rowmax moments logsumexp select onehot colsum
colmax totalsum``. Storage: ``round_to store``. Sizes: ``columns rows``.

All of them take and return traced values; none works on tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, overload

from codetta.errors import BadAttribute, ForeignValue
from codetta.language.types import Kind, Type
from codetta.language.values import Tracer, Value, author_line

Number = int | float
DTYPES = ("operand", "accumulator", "bf16", "fp16", "fp32", "fp64", "e4m3", "e5m2")


@dataclass(frozen=True, slots=True)
class Store:
    """An output together with the dtype it is stored in; made by :func:`store`."""

    value: Value
    dtype: str


def store(x: Value, dtype: str) -> Store:
    """Store ``x`` in ``dtype``: 'operand' (that of a, the default), 'accumulator', 'bf16', ...

    'operand' is bf16 where a is fp8: nothing is rounded to fp8 without being told so. 'e4m3' and
    'e5m2' saturate: what lies beyond ±448 (±57344), infinities included, is stored as that bound;
    NaN stays NaN.
    """
    return Store(_value(x, "store"), _dtype(dtype, "store"))


def round_to(x: Value, dtype: str = "operand") -> Value:
    """x rounded to a storage dtype and back; its derivative is 1, as for a cast in PyTorch.

    Use it where later arithmetic must see the stored value: ``x = round_to(acc + residual)``.
    """
    return _unary("round_to", x, dtype=_dtype(dtype, "round_to"))


def _dtype(dtype: str, op: str) -> str:
    if dtype not in DTYPES:
        raise BadAttribute(
            author_line(),
            op=op,
            attribute="dtype",
            given=dtype,
            fix=f"use one of {', '.join(DTYPES)}",
        )
    return dtype


# ----------------------------------------------------------------------------- elementwise
def abs(x: Value) -> Value:
    """abs(x) = |x|, elementwise."""
    return _unary("abs", x)


def exp(x: Value) -> Value:
    """exp(x) = e^x, elementwise."""
    return _unary("exp", x)


def log(x: Value) -> Value:
    """log(x) = ln x, elementwise."""
    return _unary("log", x)


def sqrt(x: Value) -> Value:
    """sqrt(x) = x^(1/2), elementwise."""
    return _unary("sqrt", x)


def rsqrt(x: Value) -> Value:
    """rsqrt(x) = x^(-1/2), elementwise."""
    return _unary("rsqrt", x)


def sin(x: Value) -> Value:
    """sin(x), x in radians, elementwise."""
    return _unary("sin", x)


def cos(x: Value) -> Value:
    """cos(x), x in radians, elementwise."""
    return _unary("cos", x)


def tanh(x: Value) -> Value:
    """tanh(x), elementwise."""
    return _unary("tanh", x)


def erf(x: Value) -> Value:
    """erf(x) = 2/sqrt(pi) integral_0^x e^(-t^2) dt, elementwise."""
    return _unary("erf", x)


def sigmoid(x: Value) -> Value:
    """sigmoid(x) = 1 / (1 + e^-x), elementwise."""
    return _unary("sigmoid", x)


def relu(x: Value) -> Value:
    """relu(x) = max(x, 0), elementwise; the derivative at 0 is 0, as in PyTorch."""
    return _unary("relu", x)


def square(x: Value) -> Value:
    """square(x) = x x."""
    return x * x


def pow(x: Value, exponent: Number) -> Value:
    """pow(x, n) = x^n for a Python number n; also written ``x ** n``."""
    if isinstance(exponent, bool) or not isinstance(exponent, int | float):
        raise BadAttribute(
            author_line(),
            op="pow",
            attribute="exponent",
            given=exponent,
            fix="the exponent is a Python number; x ** y is exp(y * log(x)) for x > 0",
        )
    return _unary("pow", x, exponent=float(exponent))


def maximum(x: Value | Number, y: Value | Number) -> Value:
    """maximum(x, y), elementwise; NaN wins, equal arguments share the gradient."""
    return _tracer("maximum", x, y).emit("maximum", x, y)


def minimum(x: Value | Number, y: Value | Number) -> Value:
    """minimum(x, y), elementwise; NaN wins, equal arguments share the gradient."""
    return _tracer("minimum", x, y).emit("minimum", x, y)


def where(condition: Value, x: Value | Number, y: Value | Number) -> Value:
    """where(c, x, y) = x if c else y, elementwise, for a comparison c."""
    return _tracer("where", condition, x, y).emit("where", condition, x, y)


def silu(x: Value) -> Value:
    """silu(x) = x sigmoid(x) (Elfwing et al., 2018, arXiv 1702.03118)."""
    return x * sigmoid(x)


def gelu(x: Value, approximate: str = "none") -> Value:
    """gelu(x) = x Phi(x), exact ('none') or by tanh (Hendrycks and Gimpel, arXiv 1606.08415)."""
    if approximate == "none":
        return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))
    if approximate == "tanh":
        return 0.5 * x * (1.0 + tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))))
    raise BadAttribute(
        author_line(),
        op="gelu",
        attribute="approximate",
        given=approximate,
        fix="use 'none' (erf) or 'tanh'",
    )


def softcap(x: Value, cap: Number) -> Value:
    """softcap(x, c) = c tanh(x / c)."""
    return cap * tanh(x / cap)


# -------------------------------------------------------------------------- pairs and heads
def unpack(x: Value, pairs: str = "adjacent") -> tuple[Value, Value]:
    """Both members of each pair of columns; each is half as wide as ``x``.

    ``pairs``: 'adjacent' (2j, 2j + 1), 'halves' (j, j + N/2) or 'halves:H' (within heads of H).
    """
    _value(x, "unpack")
    first, second = (_unary("unpack", x, member=i, pairs=pairs) for i in (0, 1))
    return first, second


def pack(first: Value, second: Value, pairs: str = "adjacent") -> Value:
    """Pairs of columns made of two values; inverse of :func:`unpack`."""
    return _tracer("pack", first, second).emit("pack", first, second, pairs=pairs)


def rotate(
    x: Value,
    rope: Value,
    *,
    head_dim: int,
    rotary_dim: int | None = None,
    heads: int = -1,
    pairs: str = "halves",
    inverse: bool = False,
) -> Value:
    """Rotary position embedding (Su et al., arXiv 2104.09864) by a ``Rotary`` operand.

    For each pair (a, b) of the first ``rotary_dim`` columns of each of the first ``heads`` heads
    of ``head_dim`` columns: (a cos - b sin, a sin + b cos). All other columns pass unchanged
    (``heads=-1`` rotates every head; V columns behind the q and k heads pass when ``heads`` counts
    only those). Pairs: 'adjacent' (2j, 2j + 1) or 'halves' (j, j + rotary_dim/2), in each head.
    """
    return _tracer("rotate", x, rope).emit(
        "rotate",
        x,
        rope,
        head_dim=head_dim,
        rotary_dim=head_dim if rotary_dim is None else rotary_dim,
        heads=heads,
        pairs=pairs,
        inverse=inverse,
    )


def group_sum(x: Value, size: int) -> Value:
    """Sum over each group of ``size`` adjacent columns; the result is 1/size as wide."""
    return _unary("group_sum", x, size=size)


def group_mean(x: Value, size: int) -> Value:
    """Mean over each group of ``size`` adjacent columns; the result is 1/size as wide."""
    return group_sum(x, size) * (1.0 / size)


def ungroup(x: Value, size: int) -> Value:
    """Give each of the ``size`` columns of a group the group's value; undoes the narrowing."""
    return _unary("ungroup", x, size=size)


# ------------------------------------------------------------------------------- reductions
def rowsum(x: Value) -> Value:
    """rowsum(x)[m] = sum_n x[m, n]; one partial per tile, combined afterwards."""
    return _unary("rowsum", x)


def rowmean(x: Value) -> Value:
    """rowmean(x)[m] = mean_n x[m, n], from Chan partials (n, mean, M2)."""
    return _unary("rowmean", x)


def rowmax(x: Value) -> Value:
    """rowmax(x)[m] = max_n x[m, n]; the gradient is shared by equal maxima, as in torch.amax."""
    return _unary("rowmax", x)


def moments(x: Value) -> tuple[Value, Value]:
    """Mean and population variance of each row from Chan partials (n, mean, M2).

    Stable at any mean: sums of x and x^2 lose all digits once |mean| is large against the standard
    deviation (Chan, Golub and LeVeque, 1983).
    """
    return _unary("rowmean", x), _unary("rowvar", x)


@overload
def logsumexp(x: Value) -> Value: ...
@overload
def logsumexp(x: Value, *payloads: Value) -> tuple[Value, ...]: ...
def logsumexp(x: Value, *payloads: Value) -> Any:
    """log sum_n e^x[m, n], online; with payloads p also sum_n softmax(x)[m, n] p[m, n] for each.

    (Milakov and Gimelshein, arXiv 1805.02867.) With payloads, returns a tuple (lse, mean_p, ...).
    """
    lse = _unary("rowlse", x)
    if not payloads:
        return lse
    return (lse, *(x.tracer.emit("rowsoftmean", x, p) for p in payloads))


def select(x: Value, index: Value) -> Value:
    """x[m, index[m]] per row; 0 where the index is outside [0, N)."""
    return _tracer("select", x, index).emit("select", x, index)


def onehot(index: Value, like: Value) -> Value:
    """onehot(index, like)[m, n] = 1 if n = index[m], else 0; as wide as ``like``."""
    cols, path = _value(like, "onehot").type.cols, "/".join(like.type.path)
    return _value(index, "onehot").tracer.emit("onehot", index, width=as_attribute(cols), path=path)


def colsum(x: Value) -> Value:
    """colsum(x)[n] = sum_m x[m, n]; one partial per tile, combined afterwards."""
    return _unary("colsum", x)


def colmax(x: Value) -> Value:
    """colmax(x)[n] = max_m x[m, n]; the gradient is shared by equal maxima."""
    return _unary("colmax", x)


def totalsum(x: Value) -> Value:
    """totalsum(x) = sum_mn x[m, n], a scalar."""
    return _unary("totalsum", x)


# ------------------------------------------------------------------------------------ sizes
def columns(x: Value) -> Value:
    """Number of columns of ``x`` as a scalar, for means: rowsum(x) / columns(x)."""
    _value(x, "columns")
    return x.tracer.leaf("extent", Type(Kind.SCALAR), axis="n", width=as_attribute(x.type.cols))


def rows(x: Value) -> Value:
    """Number of rows M of ``x`` as a scalar."""
    _value(x, "rows")
    return x.tracer.leaf("extent", Type(Kind.SCALAR), axis="m", width=1)


def as_attribute(cols: Fraction) -> int | Fraction:
    """A width as it is written in program text: whole numbers without a denominator."""
    return int(cols) if cols.denominator == 1 else cols


# ---------------------------------------------------------------------------------- helpers
def _value(x: Any, op: str) -> Value:
    if not isinstance(x, Value):
        raise ForeignValue(author_line(), given=f"a {type(x).__name__} given to {op}")
    return x


def _unary(op: str, x: Value, **attrs: Any) -> Value:
    return _value(x, op).tracer.emit(op, x, **attrs)


def _tracer(op: str, *args: Any) -> Tracer:
    for x in args:
        if isinstance(x, Value):
            return x.tracer
    return _value(args[0], op).tracer
