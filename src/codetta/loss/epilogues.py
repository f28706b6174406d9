"""The programs of the loss head: statistics of a chunk of logits, and their derivative.

With u = scale (r ⊙ (x Wᵀ) + bias) and z = cap tanh(u / cap), or z = u without a cap, the forward
reduces each tile of the product on the spot, in fp32 from the accumulator, to some numbers per row:

    lse      log Σ e^z, online: a (maximum, sum) per tile     (Milakov and Gimelshein, 1805.02867)
    logit    z at the target column, 0 where the target lies outside
    total    Σ z, for label smoothing
    top      max z, for the accuracy

The derivative of a row is dz = mass p − hit onehot − flat, with three numbers per row that hold the
upstream gradient, ignored tokens, weights, smoothing and z-loss:

    mass     g (1 + 2 z_loss lse)        hit    g (1 − ε)        flat    g ε / V

It is the epilogue of the same product computed again (everything in fp32); or, for the plain loss,
a row scale of shifted exponentials that the forward stored (shifted.py); or a pointwise pass over z
as the forward stored it. A stored z is off by a rounding error δ of up to |z| eps / 2.
With p = e^(z + δ − lse), a p near 1 would be off by as much, and so would p − 1, which is near 0:
p needs the log-sum-exp of the stored numbers. That is lse + log Σ softmax(z) e^δ, and for a small
δ the polynomial of e^δ − 1 rides along with the sum, without a second exponential.

The gradient of r is Σ_n dz_n q_n with the slopes q = dz/dr = scale (1 − (z / cap)²) (x Wᵀ). With
dz as above that is mass ⟨p, q⟩ − hit q_target − flat Σ q, and these come with the forward:

    mean_slope   ⟨p, q⟩, a payload of the log-sum-exp     target_slope   q at the target column
    total_slope  Σ q, with smoothing

So no logit is looked at again, whatever the bias, the cap and the smoothing are, and nothing is
divided by r: a row scale of 0 has its gradient.
"""

# Operand kinds are objects, not types, to a type checker.
# mypy: disable-error-code="valid-type, no-untyped-def, operator, arg-type"
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from inspect import Parameter, Signature
from typing import Any

from codetta.language import (
    Col,
    Index,
    Program,
    Row,
    Tile,
    colsum,
    epilogue,
    exp,
    finalizer,
    log,
    logsumexp,
    onehot,
    round_to,
    rowmax,
    rowsum,
    select,
    store,
    tanh,
    where,
)
from codetta.language.trace import OperandKind
from codetta.language.values import Value
from codetta.loss.options import Logits


@epilogue
def widened(acc):
    """a @ b in the accumulator's dtype: what the first chunk puts into a sum over chunks."""
    return store(acc, "accumulator")


@finalizer
def folded(x: Tile, column_scale: Row):
    """h = x ⊙ γ, rounded once: the product's operand where there is a column scale."""
    return x * column_scale


@cache
def unfolded(dx: bool, column: bool, stored: bool) -> Program:
    """dx = dh ⊙ γ and dγ = Σ over rows of dh ⊙ x; one of them, or both.

    dh = dz W is the accumulator, or with ``stored`` a sum that was kept in its dtype.
    """

    def made(dh: Value, column_scale: Value | None = None, x: Value | None = None):
        out = {} if column_scale is None else {"dx": dh * column_scale}
        return out | ({} if x is None else {"column_sum": colsum(dh * x)})

    operands = ({"dh": Tile} if stored else {}) | ({"column_scale": Row} if dx else {})
    name = f"loss_unfolded{'_sum' if stored else ''}"
    return _program(name, made, operands | ({"x": Tile} if column else {}), not stored)


@cache
def shifted(logits: Logits) -> Program:
    """Epilogue of x Wᵀ: e^(z − shift) stored, its sum over the row, and the target's logit.

    The shift is a number per row; see :mod:`codetta.loss.shifted`.
    """

    def made(
        acc: Value, target: Value, shift: Value, bias: Value | None = None,
        row_scale: Value | None = None,
    ):  # fmt: skip
        z = _scaled(_sum(acc, bias, row_scale), logits.scale)
        e = exp(z - shift)
        return {"e": e, "total": rowsum(e), "logit": select(z, target)}

    return _program(f"{_name(logits)}_shifted", made, _of_product(logits) | {"shift": Col}, True)


@epilogue
def scaled_rows(acc, factor: Col):
    """factor ⊙ (a @ b): a row scale of a, after the product."""
    return acc * factor


@finalizer
def weighted_rows(x: Tile, factor: Col):
    """factor ⊙ x, rounded once."""
    return x * factor


@cache
def statistics(
    logits: Logits, total: bool, top: bool, returned: bool, slopes: bool, stored: str
) -> Program:
    """Epilogue of x Wᵀ: lse and logit; on demand total, top, and z in ``logits``.

    ``slopes``: also what the gradient of the row scale needs of the slopes dz/dr, see above.
    ``stored``: '' or, for the derivative from z as it is stored, 'rounded' or 'exact'; then also
    ``stored_lse``, the log-sum-exp of the stored numbers, NaN where it is infinite, as in PyTorch.
    """

    def made(acc: Value, target: Value, bias: Value | None = None, row_scale: Value | None = None):
        z = _capped(_scaled(_sum(acc, bias, row_scale), logits.scale), logits.cap)
        payloads = [_growth(z)] if stored == "rounded" else []
        payloads += [_chain(acc, z, logits)] if slopes else []
        lse, *means = logsumexp(z, *payloads) if payloads else (logsumexp(z),)
        out = {"lse": lse, "logit": select(z, target)}
        out |= {"total": rowsum(z)} if total else {}
        out |= {"top": rowmax(z)} if top else {}
        if slopes:
            slope = payloads[-1]
            out |= {"mean_slope": means[-1], "target_slope": select(slope, target)}
            out |= {"total_slope": rowsum(slope)} if total else {}
        out |= {"logits": z} if stored or returned else {}
        if stored:
            of_stored = lse + (log(means[0] + 1.0) if stored == "rounded" else 0.0 * lse)
            out |= {"stored_lse": of_stored}
        return out

    return _program(f"{_name(logits)}_statistics", made, _of_product(logits), True)


@cache
def derivative(logits: Logits, flat: bool, bias_gradient: bool) -> Program:
    """Epilogue of x Wᵀ computed again: d(x Wᵀ), and Σ over rows of d(bias) for the bias."""

    def made(acc: Value, bias: Value | None = None, row_scale: Value | None = None, **rest: Value):
        z = _capped(_scaled(_sum(acc, bias, row_scale), logits.scale), logits.cap)
        return _derived(z, row_scale, logits, bias_gradient, **rest)

    name = f"{_name(logits)}{'_smooth' if flat else ''}_derivative"
    return _program(name, made, _of_product(logits) | _of_loss(flat), True)


@cache
def stored_derivative(logits: Logits, flat: bool, bias_gradient: bool) -> Program:
    """The same from the stored z; lse is that of the stored numbers."""

    def made(z: Value, row_scale: Value | None = None, **rest: Value):
        return _derived(z, row_scale, logits, bias_gradient, **rest)

    name = f"{_name(replace(logits, bias=False))}{'_smooth' if flat else ''}_stored_derivative"
    operands = {"z": Tile} | ({"row_scale": Col} if logits.rows else {})
    return _program(name, made, operands | {"target": Index} | _of_loss(flat), False)


# --------------------------------------------------------------------------------- operands
def _program(
    name: str, body: Callable[..., Any], operands: dict[str, OperandKind], has_acc: bool
) -> Program:
    """The program of a function whose operands depend on what the loss is."""

    def traced(*acc: Value, **values: Value) -> Any:
        return body(*acc, **values)

    keyword = Parameter.POSITIONAL_OR_KEYWORD
    parameters = [Parameter("acc", keyword)] if has_acc else []
    parameters += [Parameter(n, keyword, annotation=kind) for n, kind in operands.items()]
    traced.__name__, traced.__annotations__ = name, dict(operands)
    setattr(traced, "__signature__", Signature(parameters))  # noqa: B010
    return epilogue(traced) if has_acc else finalizer(traced)


def _name(logits: Logits) -> str:
    return f"loss{'_bias' if logits.bias else ''}{'_row_scale' if logits.rows else ''}"


def _of_product(logits: Logits) -> dict[str, OperandKind]:
    operands = ({"bias": Row} if logits.bias else {}) | ({"row_scale": Col} if logits.rows else {})
    return operands | {"target": Index}


def _of_loss(flat: bool) -> dict[str, OperandKind]:
    return {"lse": Col, "mass": Col, "hit": Col} | ({"flat": Col} if flat else {})


# --------------------------------------------------------------------------------- formulas
def _sum(acc: Value, bias: Value | None, row_scale: Value | None) -> Value:
    acc = acc if row_scale is None else acc * row_scale
    return acc if bias is None else acc + bias


def _derived(
    z: Value,
    row_scale: Value | None,
    logits: Logits,
    bias_gradient: bool,
    *,
    target: Value,
    lse: Value,
    mass: Value,
    hit: Value,
    flat: Value | None = None,
) -> dict[str, Value]:
    """dz, as that of the product x Wᵀ, and the bias' share of it before the row scale."""
    dz = mass * exp(z - lse) - hit * onehot(target, z)
    du = _chain(dz if flat is None else dz - flat, z, logits)
    product = du if row_scale is None else du * row_scale
    return {"dz": product} | ({"column_sum": colsum(du)} if bias_gradient else {})


def _growth(z: Value) -> Value:
    """e^δ − 1 for the error δ of z as it is stored."""
    stored = round_to(z)
    d = where(stored == z, 0.0, stored - z)  # infinities are stored as they are
    square = d * d  # in this order the kernel for Hopper spills no registers; by Horner it does
    return d + square * (0.5 + d * (1.0 / 6.0) + square * (1.0 / 24.0))


def _scaled(u: Value, scale: float) -> Value:
    return u if scale == 1.0 else u * scale


def _capped(u: Value, cap: float) -> Value:
    return cap * tanh(u * (1.0 / cap)) if cap else u


def _chain(dz: Value, z: Value, logits: Logits) -> Value:
    """dz/du = scale (1 − (z / cap)²) for u = r ⊙ (h Wᵀ) + bias; times what comes first."""
    if logits.cap:
        t = z * (1.0 / logits.cap)
        dz = dz * (1.0 - t * t)
    return _scaled(dz, logits.scale)
