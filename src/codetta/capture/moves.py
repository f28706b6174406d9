"""Movements of tokens: what views, permutations and slices do to all axes but one.

A tensor (tokens..., features) that is viewed, transposed or sliced outside its feature axis
has its tokens moved. The same movement can be done to another tensor with the same tokens and other
features: to hidden states in the place of their logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from codetta.capture.forms import product, same
from codetta.capture.observe import Call

aten = torch.ops.aten


class Unmovable(Exception):
    """Why a call is not a movement of tokens."""


@dataclass(frozen=True)
class OldAxis:
    """A size that is known when it runs: that of an axis before the movement."""

    index: int


@dataclass(frozen=True)
class Reshape:
    """View the token axes with other sizes; one of them may be -1."""

    sizes: tuple[int | OldAxis, ...]
    keeps_order = True

    def __call__(self, x: Tensor) -> Tensor:
        sizes = [s if isinstance(s, int) else x.shape[s.index] for s in self.sizes]
        return x.reshape(*sizes, x.shape[-1])


@dataclass(frozen=True)
class Permute:
    """Put the token axes in another order."""

    order: tuple[int, ...]
    keeps_order = False

    def __call__(self, x: Tensor) -> Tensor:
        return x.permute(*self.order, x.ndim - 1)


@dataclass(frozen=True)
class Slice:
    """Take some of the tokens along an axis."""

    axis: int
    start: int | None
    stop: int | None
    step: int
    keeps_order = False

    def __call__(self, x: Tensor) -> Tensor:
        return x[(slice(None),) * self.axis + (slice(self.start, self.stop, self.step),)]


Move = Reshape | Permute | Slice


def moved(
    call: Call, axis: int | None, backwards: bool = False
) -> tuple[Move | None, int | None]:  # fmt: skip
    """The movement of a view-like call, None where no token moves; and the axis of the features.

    Args:
        call: reads one tensor, its first argument.
        axis: where the features are, in what it reads; or, ``backwards``, in what it returns. None:
            all axes are tokens.

    Raises:
        Unmovable: it touches the features, or is known only when it runs.
    """
    x, made = call.args[0], call.result
    order = _order(call)
    if order is not None:
        return _permuted(order, axis, backwards)
    if call.op is aten.slice.Tensor:
        return _sliced(call, axis)
    given, other = (made, x) if backwards else (x, made)
    if axis is None:
        return _reshaped(list(x.shape), list(made.shape)), None
    found = _kept(given.shape, axis, other.shape)
    before, after = (found, axis) if backwards else (axis, found)
    move = _reshaped(_without(x.shape, before), _without(made.shape, after))
    return move, found


def _order(call: Call) -> list[int] | None:
    ndim = call.args[0].ndim
    if call.op is aten.permute.default:
        return [int(d) % ndim for d in call.args[1]]
    if call.op is aten.t.default:
        return list(reversed(range(ndim)))
    if call.op is aten.transpose.int:
        i, j = (int(d) % ndim for d in call.args[1:3])
        order = list(range(ndim))
        order[i], order[j] = order[j], order[i]
        return order
    return None


def _permuted(
    order: list[int], axis: int | None, backwards: bool
) -> tuple[Move | None, int | None]:
    if axis is None:
        return (None if order == sorted(order) else Permute(tuple(order))), None
    old = order[axis] if backwards else axis
    new = axis if backwards else order.index(axis)
    tokens = tuple(d - (d > old) for d in order if d != old)
    move = None if list(tokens) == sorted(tokens) else Permute(tokens)
    return move, old if backwards else new


def _sliced(call: Call, axis: int | None) -> tuple[Move | None, int | None]:
    x, made = call.args[0], call.result
    given = dict(enumerate(call.args[1:]))
    dim = int(given.get(0, 0)) % x.ndim
    start, stop, step = given.get(1), given.get(2), given.get(3, 1)
    if same(x.shape[dim], made.shape[dim]):
        return None, axis
    if dim == axis:
        raise Unmovable("a slice of the vocabulary")
    if not all(i is None or isinstance(i, int) for i in (start, stop, step)):
        raise Unmovable("a slice whose ends are known only when it runs")
    return Slice(dim - (axis is not None and dim > axis), start, stop, step), axis


def _kept(shape: Sequence[Any], axis: int, other: Sequence[Any]) -> int:
    """Where an axis is after a view."""
    before, after = product(shape[:axis]), product(shape[axis + 1 :])
    for i, size in enumerate(other):
        if not same(size, shape[axis]):
            continue
        if same(product(other[:i]), before) and same(product(other[i + 1 :]), after):
            return i
    raise Unmovable("a view that mixes tokens and vocabulary")


def _without(shape: Sequence[Any], axis: int) -> list[Any]:
    return [*shape[:axis], *shape[axis + 1 :]]


def _reshaped(old: list[Any], new: list[Any]) -> Reshape | None:
    if len(old) == len(new) and all(map(same, old, new)):
        return None
    sizes: list[int | OldAxis] = []
    for size in new:
        at = next((i for i, s in enumerate(old) if same(s, size)), None)
        sizes.append(size if isinstance(size, int) else -1 if at is None else OldAxis(at))
    if sizes.count(-1) > 1:
        raise Unmovable("a view whose sizes are known only when it runs")
    return Reshape(tuple(sizes))
