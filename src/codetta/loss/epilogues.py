"""The programs of the loss head: statistics of a chunk of logits, and their derivative.

With u = scale (x Wᵀ + bias) and z = cap tanh(u / cap), or z = u without a cap, the forward reduces
each tile of the product on the spot, in fp32 from the accumulator, to four numbers per row at most:

    lse      log Σ e^z, online: a (maximum, sum) per tile     (Milakov and Gimelshein, 1805.02867)
    logit    z at the target column, 0 where the target lies outside
    total    Σ z, for label smoothing
    top      max z, for the accuracy

The derivative of a row is dz = mass p − hit onehot − flat, with three numbers per row that hold the
upstream gradient, ignored tokens, weights, smoothing and z-loss:

    mass     g (1 + 2 z_loss lse)        hit    g (1 − ε)        flat    g ε / V

It is either the epilogue of the same product computed again (everything in fp32), or a pointwise
pass over z as the forward stored it. A stored z is off by a rounding error δ of up to |z| eps / 2.
With p = e^(z + δ − lse), a p near 1 would be off by as much, and so would p − 1, which is near 0:
p needs the log-sum-exp of the stored numbers. That is lse + log Σ softmax(z) e^δ, and for a small
δ the polynomial of e^δ − 1 rides along with the sum, without a second exponential.
"""

# Operand kinds are objects, not types, to a type checker.
# mypy: disable-error-code="valid-type, no-untyped-def, operator, arg-type"
from __future__ import annotations

from functools import cache

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
from codetta.language.values import Value
from codetta.loss.options import Logits


def _split(x: Value) -> dict[str, Value]:
    high = round_to(x)
    return {"high": high, "low": where(high == x, 0.0, x - high)}  # infinities leave nothing


@epilogue
def widened(acc):
    """a @ b in the accumulator's dtype: what the first chunk puts into a sum over chunks."""
    return store(acc, "accumulator")


@epilogue
def split(acc):
    """a @ b as a sum of two numbers of the operands' dtype, high the rounded one."""
    return _split(acc)


@epilogue
def split_sum(acc, high: Tile, low: Tile):
    """high + low + a @ b, split again: a sum over chunks with twice the digits of its dtype."""
    return _split(acc + (high + low))


@cache
def statistics(logits: Logits, total: bool, top: bool, returned: bool, stored: str) -> Program:
    """Epilogue of x Wᵀ: lse and logit; on demand total, top, and z in ``logits``.

    ``stored``: '' or, for the derivative from z as it is stored, 'rounded' or 'exact'; then also
    ``stored_lse``, the log-sum-exp of the stored numbers, NaN where it is infinite, as in PyTorch.
    """

    def made(u: Value, target: Value) -> dict[str, Value]:
        z = _capped(u, logits.cap)
        if stored == "rounded":
            lse, growth = logsumexp(z, _growth(z))
            of_stored = lse + log(growth + 1.0)
        else:
            lse = logsumexp(z)
            of_stored = lse + 0.0 * lse
        out = {"lse": lse, "logit": select(z, target)}
        out |= {"total": rowsum(z)} if total else {}
        out |= {"top": rowmax(z)} if top else {}
        out |= {"logits": z} if stored or returned else {}
        return out | ({"stored_lse": of_stored} if stored else {})

    if logits.bias:

        @epilogue
        def loss_bias_statistics(acc, bias: Row, target: Index):
            return made(_scaled(acc + bias, logits.scale), target)

        return loss_bias_statistics

    @epilogue
    def loss_statistics(acc, target: Index):
        return made(_scaled(acc, logits.scale), target)

    return loss_statistics


@cache
def derivative(logits: Logits, flat: bool, bias_gradient: bool) -> Program:
    """Epilogue of x Wᵀ computed again: d(x Wᵀ), and Σ over rows of it for the bias."""

    def made(u: Value, target: Value, lse: Value, mass: Value, hit: Value, rest: Value | None):
        z = _capped(u, logits.cap)
        dz = mass * exp(z - lse) - hit * onehot(target, z)
        return _outputs(_chain(dz if rest is None else dz - rest, z, logits), bias_gradient)

    if logits.bias and flat:

        @epilogue
        def loss_bias_smooth_derivative(
            acc, bias: Row, target: Index, lse: Col, mass: Col, hit: Col, flat: Col
        ):
            return made(_scaled(acc + bias, logits.scale), target, lse, mass, hit, flat)

        return loss_bias_smooth_derivative
    if logits.bias:

        @epilogue
        def loss_bias_derivative(acc, bias: Row, target: Index, lse: Col, mass: Col, hit: Col):
            return made(_scaled(acc + bias, logits.scale), target, lse, mass, hit, None)

        return loss_bias_derivative
    if flat:

        @epilogue
        def loss_smooth_derivative(acc, target: Index, lse: Col, mass: Col, hit: Col, flat: Col):
            return made(_scaled(acc, logits.scale), target, lse, mass, hit, flat)

        return loss_smooth_derivative

    @epilogue
    def loss_derivative(acc, target: Index, lse: Col, mass: Col, hit: Col):
        return made(_scaled(acc, logits.scale), target, lse, mass, hit, None)

    return loss_derivative


@cache
def stored_derivative(logits: Logits, flat: bool, bias_gradient: bool) -> Program:
    """The same from the stored z; lse is that of the stored numbers."""

    def made(z: Value, target: Value, lse: Value, mass: Value, hit: Value, rest: Value | None):
        dz = mass * exp(z - lse) - hit * onehot(target, z)
        return _outputs(_chain(dz if rest is None else dz - rest, z, logits), bias_gradient)

    if flat:

        @finalizer
        def loss_smooth_stored_derivative(
            z: Tile, target: Index, lse: Col, mass: Col, hit: Col, flat: Col
        ):
            return made(z, target, lse, mass, hit, flat)

        return loss_smooth_stored_derivative

    @finalizer
    def loss_stored_derivative(z: Tile, target: Index, lse: Col, mass: Col, hit: Col):
        return made(z, target, lse, mass, hit, None)

    return loss_stored_derivative


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
    """dz/d(x Wᵀ) = scale (1 − (z / cap)²)."""
    if logits.cap:
        t = z * (1.0 / logits.cap)
        dz = dz * (1.0 - t * t)
    return _scaled(dz, logits.scale)


def _outputs(dz: Value, bias_gradient: bool) -> dict[str, Value]:
    return {"dz": dz} | ({"column_sum": colsum(dz)} if bias_gradient else {})
