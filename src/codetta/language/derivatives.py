"""DERIVATIVE rules: cotangents of the arguments, written in the language itself.

A rule takes the cotangent ``d`` of the result, the result ``y``, the attributes and the arguments
and returns one cotangent per argument (None for zero). It may return a value over more axes than
the argument has (the argument was broadcast); the caller sums those out. Rules may use reductions
inside tiles; :mod:`codetta.language.vjp` schedules what results into as many passes as it takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from codetta.language import functions as f
from codetta.language.primitives import COMPARISONS, DERIVATIVE
from codetta.language.values import Value

Attrs = Mapping[str, Any]
Cotangents = tuple[Value | None, ...]


def broadcast_like(x: Value, like: Value) -> Value:
    """x repeated over the axes that ``like`` has and x lacks."""
    t, target = x.type, like.type
    axes = ("m" if target.has_rows and not t.has_rows else "") + (
        "n" if target.has_cols and not t.has_cols else ""
    )
    if not axes:
        return x
    width = f.as_attribute(target.cols if target.has_cols else Fraction(1))
    extra: dict[str, Any] = {} if target.rows == "M" else {"rows": target.rows}
    return x.tracer.emit(
        "broadcast", x, axes=axes, width=width, path="/".join(target.path), **extra
    )


def _rule(name: str, derivative: Any) -> None:
    """Rule of a unary map with derivative(d, y, x)."""
    DERIVATIVE.rule(name)(lambda d, y, attrs, x: (derivative(d, y, x),))


_rule("neg", lambda d, y, x: -d)
_rule("abs", lambda d, y, x: f.where(x > 0, d, f.where(x < 0, -d, 0.0)))
_rule("exp", lambda d, y, x: d * y)
_rule("log", lambda d, y, x: d / x)
_rule("sqrt", lambda d, y, x: 0.5 * d / y)
_rule("rsqrt", lambda d, y, x: -0.5 * d * (y * y * y))
_rule("sin", lambda d, y, x: d * f.cos(x))
_rule("cos", lambda d, y, x: -d * f.sin(x))
_rule("tanh", lambda d, y, x: d * (1.0 - y * y))
_rule("erf", lambda d, y, x: d * (2.0 / math.sqrt(math.pi)) * f.exp(-(x * x)))
_rule("sigmoid", lambda d, y, x: d * (y * (1.0 - y)))
_rule("relu", lambda d, y, x: f.where(x > 0, d, 0.0))
_rule("round_to", lambda d, y, x: d)


@DERIVATIVE.rule("pow")
def _pow(d: Value, y: Value, attrs: Attrs, x: Value) -> Cotangents:
    n = attrs["exponent"]
    return (None,) if n == 0.0 else (d * (n * f.pow(x, n - 1.0)),)


@DERIVATIVE.rule("add")
def _add(d: Value, y: Value, attrs: Attrs, a: Value, b: Value) -> Cotangents:
    return d, d


@DERIVATIVE.rule("sub")
def _sub(d: Value, y: Value, attrs: Attrs, a: Value, b: Value) -> Cotangents:
    return d, -d


@DERIVATIVE.rule("mul")
def _mul(d: Value, y: Value, attrs: Attrs, a: Value, b: Value) -> Cotangents:
    if a.id == b.id:
        return d * (2.0 * a), None  # one term instead of two equal ones
    return d * b, d * a


@DERIVATIVE.rule("div")
def _div(d: Value, y: Value, attrs: Attrs, a: Value, b: Value) -> Cotangents:
    return d / b, -(d * (y / b))


@DERIVATIVE.rule("maximum")
def _maximum(d: Value, y: Value, attrs: Attrs, a: Value, b: Value) -> Cotangents:
    half = 0.5 * d
    return (
        f.where(a > b, d, f.where(a < b, 0.0, half)),
        f.where(b > a, d, f.where(b < a, 0.0, half)),
    )


@DERIVATIVE.rule("minimum")
def _minimum(d: Value, y: Value, attrs: Attrs, a: Value, b: Value) -> Cotangents:
    first, second = _maximum(d, y, attrs, b, a)
    return first, second


@DERIVATIVE.rule(*COMPARISONS)
def _comparison(d: Value, y: Value, attrs: Attrs, a: Value, b: Value) -> Cotangents:
    return None, None


@DERIVATIVE.rule("where")
def _where(d: Value, y: Value, attrs: Attrs, c: Value, a: Value, b: Value) -> Cotangents:
    return None, f.where(c, d, 0.0), f.where(c, 0.0, d)


@DERIVATIVE.rule("broadcast")
def _broadcast(d: Value, y: Value, attrs: Attrs, x: Value) -> Cotangents:
    return (d,)  # the caller sums over the axes that x lacks


@DERIVATIVE.rule("unpack")
def _unpack(d: Value, y: Value, attrs: Attrs, x: Value) -> Cotangents:
    d = broadcast_like(d, y)  # the sum with the other member's pack is simplified to one pack
    pair = (d, 0.0) if attrs["member"] == 0 else (0.0, d)
    return (d.tracer.emit("pack", *pair, pairs=attrs["pairs"]),)


@DERIVATIVE.rule("pack")
def _pack(d: Value, y: Value, attrs: Attrs, a: Value, b: Value) -> Cotangents:
    return f.unpack(broadcast_like(d, y), attrs["pairs"])


@DERIVATIVE.rule("rotate")
def _rotate(d: Value, y: Value, attrs: Attrs, x: Value, rope: Value) -> Cotangents:
    turn = dict(attrs) | {"inverse": not attrs["inverse"]}
    return d.tracer.emit("rotate", broadcast_like(d, y), rope, **turn), None


@DERIVATIVE.rule("group_sum")
def _group_sum(d: Value, y: Value, attrs: Attrs, x: Value) -> Cotangents:
    return (f.ungroup(broadcast_like(d, y), attrs["size"]),)


@DERIVATIVE.rule("ungroup")
def _ungroup(d: Value, y: Value, attrs: Attrs, x: Value) -> Cotangents:
    return (f.group_sum(broadcast_like(d, y), attrs["size"]),)


@DERIVATIVE.rule("onehot")
def _onehot(d: Value, y: Value, attrs: Attrs, index: Value) -> Cotangents:
    return (None,)


# --------------------------------------------------------------------------- reductions
@DERIVATIVE.rule("rowsum", "colsum", "totalsum")
def _sum(d: Value, y: Value, attrs: Attrs, x: Value) -> Cotangents:
    return (d,)


# The maximum is taken again, of x as the backward sees it: x may be rebuilt from a rounded store,
# and then no element would equal the forward's maximum.
@DERIVATIVE.rule("rowmax")
def _rowmax(d: Value, y: Value, attrs: Attrs, x: Value) -> Cotangents:
    ties = f.where(x == f.rowmax(x), 1.0, 0.0)
    return (d / f.rowsum(ties) * ties,)


@DERIVATIVE.rule("colmax")
def _colmax(d: Value, y: Value, attrs: Attrs, x: Value) -> Cotangents:
    ties = f.where(x == f.colmax(x), 1.0, 0.0)
    return (d / f.colsum(ties) * ties,)


@DERIVATIVE.rule("rowmean")
def _rowmean(d: Value, y: Value, attrs: Attrs, x: Value) -> Cotangents:
    return (d / f.columns(x),)


@DERIVATIVE.rule("rowvar")
def _rowvar(d: Value, y: Value, attrs: Attrs, x: Value) -> Cotangents:
    return ((2.0 * d / f.columns(x)) * (x - f.rowmean(x)),)


@DERIVATIVE.rule("rowlse")
def _rowlse(d: Value, y: Value, attrs: Attrs, x: Value) -> Cotangents:
    return (d * f.exp(x - y),)


@DERIVATIVE.rule("rowsoftmean")
def _rowsoftmean(d: Value, y: Value, attrs: Attrs, x: Value, p: Value) -> Cotangents:
    weight = d * f.exp(x - f.logsumexp(x))
    return weight * (p - y), weight


@DERIVATIVE.rule("select")
def _select(d: Value, y: Value, attrs: Attrs, x: Value, index: Value) -> Cotangents:
    width, path = f.as_attribute(x.type.cols), "/".join(x.type.path)
    return d * d.tracer.emit("onehot", index, width=width, path=path), None


@DERIVATIVE.rule("combine")
def _combine(d: Value, y: Value, attrs: Attrs, *parts: Value) -> Cotangents:
    return (None,) * len(parts)  # partials are made and consumed inside one derivative
