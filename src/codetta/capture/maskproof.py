"""Proof that a mask of unknown size is the causal one.

Each tensor of the mask's computation is followed as a formula of its coordinates that holds in
every size: a constant, one axis' coordinate plus a constant, or where one coordinate is not after
another. What has no such formula proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from codetta.capture.forms import same
from codetta.capture.observe import Call, Observed

aten = torch.ops.aten


@dataclass(frozen=True)
class Constant:
    """The same number, or truth value, everywhere."""

    value: int


@dataclass(frozen=True)
class Coordinate:
    """The coordinate along an axis, counted from the last (-1), plus a constant."""

    axis: int
    plus: int


@dataclass(frozen=True)
class NotAfter:
    """Where the coordinate along axis ``left`` is at most that along ``right``."""

    left: int
    right: int


Formula = Constant | Coordinate | NotAfter


class _Unproved(Exception):
    """A tensor has no formula."""


def proved_causal(mask: fx.Node, seen: Observed) -> bool:
    """Whether ``mask`` is True exactly where key <= query, in every size."""
    proof = _Proof()
    for node in mask.graph.nodes:
        for call in seen.calls.get(node) or ():
            proof.follow(call)
        if node is mask:
            break
    return proof.known.get(id(seen.values[mask])) == NotAfter(-1, -2)


class _Proof:
    """Formulas by tensor identity."""

    def __init__(self) -> None:
        self.known: dict[int, Formula] = {}

    def follow(self, call: Call) -> None:
        if call.op not in _RULES or not isinstance(call.result, Tensor):
            return
        try:
            self.known[id(call.result)] = _RULES[call.op](self, call, *call.args)
        except _Unproved:
            return

    def of(self, x: Any) -> Formula:
        if isinstance(x, bool | int):
            return Constant(int(x))
        if id(x) in self.known:
            return self.known[id(x)]
        raise _Unproved

    def stretched(self, x: Any, shape: Any) -> Formula:
        """x repeated to ``shape``: an axis of size 1 has coordinate 0 everywhere."""
        found = self.of(x)
        if not isinstance(x, Tensor) or isinstance(found, Constant):
            return found
        axes = (found.axis,) if isinstance(found, Coordinate) else (found.left, found.right)
        if all(same(x.shape[a], shape[a]) for a in axes):
            return found
        if isinstance(found, Coordinate) and same(x.shape[found.axis], 1):
            return Constant(found.plus)
        raise _Unproved


_RULES: dict[Any, Callable[..., Formula]] = {}


def _rule(*ops: Any) -> Callable[[Callable[..., Formula]], Callable[..., Formula]]:
    def register(f: Callable[..., Formula]) -> Callable[..., Formula]:
        _RULES.update(dict.fromkeys(ops, f))
        return f

    return register


@_rule(aten.arange.default)
def _arange(proof: _Proof, call: Call, end: Any) -> Formula:
    if call.result.dtype not in (torch.int64, torch.int32):
        raise _Unproved
    return Coordinate(-1, 0)


@_rule(aten.ones.default, aten.new_ones.default)
def _ones(proof: _Proof, call: Call, *ignored: Any) -> Formula:
    return Constant(1)


@_rule(aten.detach.default, aten.clone.default, aten.alias.default)
def _same(proof: _Proof, call: Call, x: Tensor) -> Formula:
    return proof.of(x)


@_rule(aten._to_copy.default)
def _cast(proof: _Proof, call: Call, x: Tensor) -> Formula:
    if call.result.dtype is not x.dtype:
        raise _Unproved
    return proof.of(x)


@_rule(aten.expand.default)
def _expand(proof: _Proof, call: Call, x: Tensor, shape: Any) -> Formula:
    return proof.stretched(x, call.result.shape)


@_rule(aten.unsqueeze.default)
def _unsqueeze(proof: _Proof, call: Call, x: Tensor, dim: int) -> Formula:
    at = dim % call.result.ndim

    def moved(axis: int) -> int:  # counted from the last: only what lies before `at` moves away
        return axis - 1 if axis + x.ndim < at else axis

    found = proof.of(x)
    if isinstance(found, Coordinate):
        return replace(found, axis=moved(found.axis))
    if isinstance(found, NotAfter):
        return NotAfter(moved(found.left), moved(found.right))
    return found


@_rule(aten.slice.Tensor)
def _slice(
    proof: _Proof, call: Call, x: Tensor, dim: int = 0, start: Any = None, end: Any = None,
    step: int = 1,
) -> Formula:  # fmt: skip
    start = 0 if start is None else start
    found, axis = proof.of(x), dim % x.ndim - x.ndim
    if not isinstance(start, int) or start < 0 or step != 1:
        raise _Unproved
    if isinstance(found, Coordinate) and found.axis == axis:
        return replace(found, plus=found.plus + start)
    if isinstance(found, NotAfter) and start and axis in (found.left, found.right):
        raise _Unproved
    return found


@_rule(aten.cat.default)
def _cat(proof: _Proof, call: Call, tensors: Any, dim: int = 0) -> Formula:
    """One element before a run of coordinates, where it continues the run downwards."""
    if len(tensors) != 2 or not same(tensors[0].shape[dim], 1):
        raise _Unproved
    axis = dim % call.result.ndim - call.result.ndim
    first, rest = (proof.of(x) for x in tensors)
    if isinstance(first, Coordinate) and first.axis == axis:
        first = Constant(first.plus)  # its only coordinate is 0
    if not (isinstance(first, Constant) and isinstance(rest, Coordinate) and rest.axis == axis):
        raise _Unproved
    if first.value != rest.plus - 1:
        raise _Unproved
    return replace(rest, plus=rest.plus - 1)


@_rule(aten.cumsum.default)
def _cumsum(proof: _Proof, call: Call, x: Tensor, dim: int) -> Formula:
    if proof.of(x) != Constant(0):
        raise _Unproved
    return Constant(0)


@_rule(aten.index.Tensor)
def _index(proof: _Proof, call: Call, x: Tensor, indices: Any) -> Formula:
    found = proof.of(x)
    if isinstance(found, Constant):
        return found
    if isinstance(found, NotAfter) or len(indices) != x.ndim or any(i is None for i in indices):
        raise _Unproved
    at = proof.stretched(indices[found.axis], call.result.shape)
    if isinstance(at, Coordinate) and at.plus >= 0:
        return replace(at, plus=at.plus + found.plus)
    if isinstance(at, Constant) and at.value >= 0:
        return Constant(at.value + found.plus)
    raise _Unproved


@_rule(aten.add.Tensor, aten.add.Scalar)
def _add(proof: _Proof, call: Call, x: Any, y: Any) -> Formula:
    return _sum(proof, call, x, y, 1)


@_rule(aten.sub.Tensor, aten.sub.Scalar)
def _sub(proof: _Proof, call: Call, x: Any, y: Any) -> Formula:
    return _sum(proof, call, x, y, -1)


def _sum(proof: _Proof, call: Call, x: Any, y: Any, sign: int) -> Formula:
    if call.kwargs or call.result.dtype is torch.bool:
        raise _Unproved
    a, b = (proof.stretched(t, call.result.shape) for t in (x, y))
    if isinstance(a, Constant) and isinstance(b, Constant):
        return Constant(a.value + sign * b.value)
    if isinstance(a, Coordinate) and isinstance(b, Constant):
        return replace(a, plus=a.plus + sign * b.value)
    if isinstance(a, Coordinate) and isinstance(b, Coordinate) and sign < 0 and a.axis == b.axis:
        return Constant(a.plus - b.plus)
    raise _Unproved


@_rule(aten.eq.Tensor, aten.eq.Scalar)
def _eq(proof: _Proof, call: Call, x: Any, y: Any) -> Formula:
    a, b = (proof.stretched(t, call.result.shape) for t in (x, y))
    if not (isinstance(a, Constant) and isinstance(b, Constant)):
        raise _Unproved
    return Constant(int(a.value == b.value))


@_rule(aten.ne.Tensor, aten.ne.Scalar)
def _ne(proof: _Proof, call: Call, x: Any, y: Any) -> Formula:
    equal = _eq(proof, call, x, y)
    assert isinstance(equal, Constant)
    return Constant(1 - equal.value)


@_rule(aten.le.Tensor)
def _le(proof: _Proof, call: Call, x: Any, y: Any) -> Formula:
    a, b = (proof.stretched(t, call.result.shape) for t in (x, y))
    if not (isinstance(a, Coordinate) and isinstance(b, Coordinate)):
        raise _Unproved
    if a.plus != b.plus or a.axis == b.axis:
        raise _Unproved
    return NotAfter(a.axis, b.axis)


@_rule(aten.ge.Tensor)
def _ge(proof: _Proof, call: Call, x: Any, y: Any) -> Formula:
    return _le(proof, call, y, x)


@_rule(aten.bitwise_and.Tensor, aten.logical_and.default)
def _and(proof: _Proof, call: Call, x: Any, y: Any) -> Formula:
    if call.result.dtype is not torch.bool:
        raise _Unproved
    a, b = (proof.stretched(t, call.result.shape) for t in (x, y))
    if a == Constant(1) or a == b:
        return b
    if b == Constant(1):
        return a
    raise _Unproved
