"""Logits and their loss, followed through aten operators.

A tensor is *logits* as long as factors, one tanh, casts to wider dtypes and movements of its tokens
(moves.py) are all that lies between it and its product; log_softmax over the vocabulary and then
nll_loss make it a *loss*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from codetta.capture.forms import same
from codetta.capture.moves import Move, moved
from codetta.capture.observe import Call, Observed

aten = torch.ops.aten
_REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class Source:
    """An operand of the product: a named tensor, moved, read in some dtype."""

    node: fx.Node
    dtype: torch.dtype
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, eq=False)
class Product:
    """x @ right + bias, with right (K, N)."""

    at: fx.Node
    x: Source
    right: Source
    transposed: bool  # right is stored as (N, K)
    bias: Source | None
    sizes: tuple[Any, int, int]


@dataclass(frozen=True)
class Logits:
    """post · tanh(pre · z) of a product z, or pre · z; its tokens moved.

    Attributes:
        axis: which of the tensor's axes is the vocabulary.
        up, down: pre = up / down.
        post: factor behind tanh; None where there is no tanh.
        log: whether log_softmax was taken.
    """

    product: Product
    moves: tuple[Move, ...]
    axis: int
    up: float = 1.0
    down: float = 1.0
    post: float | None = None
    log: bool = False


@dataclass(frozen=True)
class Loss:
    """A cross-entropy of logits."""

    logits: Logits
    target: Source
    ignore_index: int
    reduction: str
    like_target: bool = False  # one loss per target, of the target's shape


class Unfit(Exception):
    """Why a tensor made of logits is not one of those above."""


class Reader(Protocol):
    """What rules ask of the reading."""

    seen: Observed

    def source(self, x: Tensor, axis: int | None) -> Source: ...


# ------------------------------------------------------------------------------------- rules
Rule = Callable[..., "Logits | Loss"]
RULES: dict[Any, Rule] = {}
MOVES = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default,
        aten.clone.default, aten.contiguous.default, aten.unsqueeze.default, aten.squeeze.dim,
        aten.transpose.int, aten.permute.default, aten.t.default, aten.slice.Tensor,
    }
)  # fmt: skip


def _rule(*ops: Any) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, function))
        return function

    return register


@_rule(*MOVES)
def _move(
    reader: Reader, call: Call, x: Logits | Loss, *ignored: Any, **options: Any
) -> Logits | Loss:
    if isinstance(x, Loss):
        shape = reader.seen.values[x.target.node].shape
        made = call.result.shape
        if x.reduction == "none" and len(made) == len(shape) and all(map(same, made, shape)):
            return replace(x, like_target=True)
        raise Unfit("its losses are moved")
    move, axis = moved(call, x.axis)
    assert axis is not None
    return replace(x, moves=x.moves if move is None else (*x.moves, move), axis=axis)


@_rule(aten._to_copy.default)
def _cast(reader: Reader, call: Call, x: Logits | Loss, **ignored: Any) -> Logits:
    given, made = call.args[0], call.result
    logits = _logits(x)
    if made.device != given.device or not made.dtype.is_floating_point:
        raise Unfit("its logits are copied to another device, or cast to integers")
    if made.dtype.itemsize < given.dtype.itemsize:
        raise Unfit(f"its logits are rounded to {made.dtype}")
    return logits


@_rule(aten.mul.Tensor, aten.mul.Scalar)
def _mul(reader: Reader, call: Call, x: Logits | Loss, factor: Any) -> Logits:
    logits = _logits(x, scaled=True)
    if logits.post is None:
        return replace(logits, up=logits.up * _number(factor))
    return replace(logits, post=logits.post * _number(factor))


@_rule(aten.div.Tensor, aten.div.Scalar)
def _div(reader: Reader, call: Call, x: Logits | Loss, divisor: Any) -> Logits:
    logits = _logits(x, scaled=True)
    if logits.post is None:
        return replace(logits, down=logits.down * _number(divisor))
    return replace(logits, post=logits.post / _number(divisor))


@_rule(aten.tanh.default)
def _tanh(reader: Reader, call: Call, x: Logits | Loss) -> Logits:
    logits = _logits(x, scaled=True)
    if logits.post is not None:
        raise Unfit("its logits are capped twice")
    return replace(logits, post=1.0)


@_rule(aten._log_softmax.default)
def _log_softmax(reader: Reader, call: Call, x: Logits | Loss, dim: int, half: bool) -> Logits:
    logits = _logits(x, scaled=True)
    if dim % call.result.ndim != logits.axis:
        raise Unfit("log_softmax over the tokens")
    if logits.post is not None and logits.post <= 0:
        raise Unfit("a cap that is not positive")
    return replace(logits, log=True)


@_rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll(
    reader: Reader, call: Call, x: Logits | Loss, target: Tensor, weight: Tensor | None,
    reduction: int, ignore_index: int,
) -> Loss:  # fmt: skip
    if isinstance(x, Loss) or not x.log:
        raise Unfit("nll_loss without log_softmax")
    if weight is not None:
        raise Unfit("its classes have weights")
    if x.axis != min(1, call.args[0].ndim - 1):
        raise Unfit("nll_loss over the tokens")
    source = reader.source(target, None)
    if any(not m.keeps_order for m in source.moves):
        raise Unfit("its targets are moved")
    name = _REDUCTIONS[int(reduction)]
    shape = reader.seen.values[source.node].shape
    made = call.result[0].shape
    alike = len(made) == len(shape) and all(map(same, made, shape))
    return Loss(x, source, int(ignore_index), name, name == "none" and alike)


def _logits(x: Logits | Loss, scaled: bool = False) -> Logits:
    if isinstance(x, Loss):
        raise Unfit("the loss is computed on" if scaled else "the loss is cast")
    if scaled and x.log:
        raise Unfit("log_softmax is computed on")
    return x


def _number(x: Any) -> float:
    if isinstance(x, bool) or not isinstance(x, int | float) or x == 0:
        raise Unfit("its logits are scaled by something that is not a number")
    return float(x)
