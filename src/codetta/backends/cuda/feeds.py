"""From a call's operands to the parameters of the kernel: what is passed, copied or made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from codetta.backends.cuda import arrays
from codetta.backends.cuda.forms import ELEMENT, PACKED, PAIR, Load, Lowered, period, storage
from codetta.backends.cuda.rotary import rotary
from codetta.backends.cuda.rules import NotLowerable
from codetta.language.meaning import NAMED_DTYPES
from codetta.language.program import Program
from codetta.language.types import Kind

#: From the call's operands to one parameter of the kernel.
Feed = Callable[[Sequence[Tensor]], Any]
_FP32_INTEGERS = 2**24


class Inline:
    """A feed that is an expression of ``t``, the operands; a bound call (bound.py) contains it.

    Attributes:
        vector: position of the operand that it makes one-dimensional, if it does that alone.
    """

    __slots__ = ("call", "text", "vector")

    def __init__(self, text: str, vector: int | None = None) -> None:
        self.text, self.vector = text, vector
        self.call = _expression(text)

    def __call__(self, t: Sequence[Tensor]) -> Any:
        return self.call(t)


class Fixed:
    """A feed that is the same in every call."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __call__(self, t: Sequence[Tensor]) -> Any:
        return self.make()


@lru_cache(maxsize=1024)
def _expression(text: str) -> Feed:
    made: Feed = eval(f"lambda t: {text}")
    return made


def positions(program: Program) -> dict[str, int]:
    """Where an operand starts in the flat list."""
    found, i = {}, 0
    for o in program.operands:
        found[o.name] = i
        i += 2 if o.kind is Kind.ROTARY else 1
    return found


def sides(a: Tensor, b: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """From a (M, K) and b (K, N) to what the mainloop reads."""
    if a.element_size() > 1:
        return _side(a), _side(b)
    feed_a = itself if arrays.is_matrix(a, either=False) else arrays.k_major
    return feed_a, itself if arrays.is_matrix(b.t(), either=False) else _columns_k_major


def _side(x: Tensor) -> Callable[[Tensor], Tensor]:
    return itself if arrays.is_matrix(x, either=True) else arrays.matrix


def _columns_k_major(b: Tensor) -> Tensor:
    return arrays.k_major(b.t()).t()


def itself(x: Tensor) -> Tensor:
    return x


def _matrix_feed(lowered: Lowered, load: Load, x: Tensor, i: int) -> Feed:
    if lowered.mode == PACKED and load.port == "c":
        assert lowered.d is not None
        if NAMED_DTYPES[storage(lowered.d.dtype, lowered.operand)] != x.dtype:
            raise NotLowerable(f"operand {load.operand!r} in {x.dtype}, which is not D's dtype")
    either = lowered.mode == ELEMENT
    if arrays.is_matrix(x, either=either):
        return Inline(f"t[{i}]")
    return lambda operands: arrays.matrix(operands[i], either=either)


def c_feed(lowered: Lowered, operands: Sequence[Tensor]) -> Feed | None:
    """The matrix that the mainloop loads as C."""
    load = next((x for x in lowered.loads if x.port == "c"), None)
    if load is None:
        return None
    i = positions(lowered.program)[load.operand]
    return _matrix_feed(lowered, load, operands[i], i)


def all_feeds(
    lowered: Lowered,
    operands: Sequence[Tensor],
    m: int,
    n: int,
    device: torch.device,
    partial: bool,
) -> tuple[tuple[str, Feed], ...]:
    """Feeds of all other parameters, by name.

    Args:
        partial: whether the last tile of a row reaches beyond column n.
    """
    at = positions(lowered.program)
    feeds: list[tuple[str, Feed]] = []
    for load in lowered.loads:
        if load.port == "c":
            continue
        i = at.get(load.operand, 0)
        if load.port == "tile":
            feed = _matrix_feed(lowered, load, operands[i], i)
        elif load.port == "row":
            feed = _row_feed(lowered, load, operands[i], i)
        elif load.port == "onehot" and n > _FP32_INTEGERS:
            raise NotLowerable(f"onehot over more than {_FP32_INTEGERS} columns")
        else:
            feed = _FEEDS[load.port](load, i, m, n, operands[i] if operands else None, device)
        feeds.append((load.name, feed))
    for sink in lowered.sinks:
        if sink.fold == "select":
            i = at[sink.operand]
            # QuACK's sink writes any column of a tile, also one beyond the matrix.
            feeds.append((sink.index, _indices(i, n if partial else None)))
    return tuple(feeds)


def _row_feed(lowered: Lowered, load: Load, x: Tensor, i: int) -> Feed:
    width = lowered.program.operand(load.operand).width
    if lowered.mode == PAIR and width == Fraction(1, 2):
        return lambda operands: arrays.half_row(operands[i])
    if lowered.mode == PACKED and width == 2:
        return lambda operands: arrays.row_part(operands[i], load.part)
    return _vector(load, i, m=0, n=0, x=x, device=x.device)


def _vector(load: Load, i: int, m: int, n: int, x: Tensor, device: torch.device) -> Feed:
    # Calls are told apart by alignment to 16 bytes, which four elements of 64 bits exceed.
    if arrays.is_vector(x) and x.element_size() <= 4:
        return Inline(f"t[{i}].reshape(-1)", vector=i)
    return lambda operands: arrays.vector(operands[i])


def _number(load: Load, i: int, m: int, n: int, x: Tensor, device: torch.device) -> Feed:
    if x.dtype is torch.float32:
        return Inline(f"t[{i}].reshape(1)")
    return lambda operands: arrays.number(operands[i])


def _index(load: Load, i: int, m: int, n: int, x: Tensor, device: torch.device) -> Feed:
    return _indices(i)


def _indices(i: int, columns: int | None = None) -> Feed:
    return lambda operands: arrays.indices(operands[i], columns)


def _extent(load: Load, i: int, m: int, n: int, x: Tensor, device: torch.device) -> Feed:
    axis, width = load.detail
    assert isinstance(width, Fraction)
    size = float(m if axis == "m" else n * width)
    return Fixed(lambda: size)


def _rotary(load: Load, i: int, m: int, n: int, x: Tensor, device: torch.device) -> Feed:
    head_dim = int(load.detail[0])
    columns = period(head_dim)
    return lambda operands: rotary(operands[i], operands[i + 1], head_dim, columns)


def _turns(load: Load, i: int, m: int, n: int, x: Tensor, device: torch.device) -> Feed:
    head_dim, rotary_dim, heads = (int(x) for x in load.detail)
    return Fixed(lambda: arrays.turning(n, head_dim, rotary_dim, heads, device))


def _ones(load: Load, i: int, m: int, n: int, x: Tensor, device: torch.device) -> Feed:
    size = m if load.port == "valid_m" else n
    return Fixed(lambda: arrays.ones(size, device))


#: From a load to its feed, by port: (load, position of the operand, M, N, operand, device).
_FEEDS: dict[str, Callable[..., Feed]] = {
    "col": _vector,
    "scalar": _number,
    "onehot": _index,
    "extent": _extent,
    "rotary": _rotary,
    "turns": _turns,
    "valid_n": _ones,
    "valid_m": _ones,
}
