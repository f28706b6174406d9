"""From a call's operands to the parameters of the kernel: what is passed, copied or made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from codetta.backends.cuda import arrays
from codetta.backends.cuda.forms import ELEMENT, PACKED, PAIR, Load, Lowered, period, storage
from codetta.backends.cuda.rules import NotLowerable
from codetta.language.meaning import NAMED_DTYPES
from codetta.language.program import Program
from codetta.language.types import Kind

#: From the call's operands to one parameter of the kernel.
Feed = Callable[[Sequence[Tensor]], Any]
_FP32_INTEGERS = 2**24


def _positions(program: Program) -> dict[str, int]:
    """Where an operand starts in the flat list."""
    found, i = {}, 0
    for o in program.operands:
        found[o.name] = i
        i += 2 if o.kind is Kind.ROTARY else 1
    return found


def side(x: Tensor) -> Callable[[Tensor], Tensor]:
    return _itself if arrays.is_matrix(x, either=True) else arrays.matrix


def _itself(x: Tensor) -> Tensor:
    return x


def _matrix_feed(lowered: Lowered, load: Load, x: Tensor, i: int) -> Feed:
    if lowered.mode == PACKED and load.port == "c":
        assert lowered.d is not None
        if NAMED_DTYPES[storage(lowered.d.dtype, lowered.operand)] != x.dtype:
            raise NotLowerable(f"operand {load.operand!r} in {x.dtype}, which is not D's dtype")
    either = lowered.mode == ELEMENT
    if arrays.is_matrix(x, either=either):
        return lambda operands: operands[i]
    return lambda operands: arrays.matrix(operands[i], either=either)


def c_feed(lowered: Lowered, operands: Sequence[Tensor]) -> Feed | None:
    """The matrix that the mainloop loads as C."""
    load = next((x for x in lowered.loads if x.port == "c"), None)
    if load is None:
        return None
    i = _positions(lowered.program)[load.operand]
    return _matrix_feed(lowered, load, operands[i], i)


def all_feeds(
    lowered: Lowered, operands: Sequence[Tensor], m: int, n: int, device: torch.device
) -> tuple[tuple[str, Feed], ...]:
    """Feeds of all other parameters, by name."""
    at = _positions(lowered.program)
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
            feed = _FEEDS[load.port](load, i, m, n, device)
        feeds.append((load.name, feed))
    for sink in lowered.sinks:
        if sink.fold == "select":
            i = at[sink.operand]
            feeds.append((f"index_{sink.operand}", _of_operand(arrays.indices, None, i)))
    return tuple(feeds)


def _row_feed(lowered: Lowered, load: Load, x: Tensor, i: int) -> Feed:
    width = lowered.program.operand(load.operand).width
    if lowered.mode == PAIR and width == Fraction(1, 2):
        return lambda operands: arrays.half_row(operands[i])
    if lowered.mode == PACKED and width == 2:
        return lambda operands: arrays.row_part(operands[i], load.part)
    return lambda operands: arrays.vector(operands[i])


def _extent(load: Load, i: int, m: int, n: int, device: torch.device) -> Feed:
    axis, width = load.detail
    assert isinstance(width, Fraction)
    size = float(m if axis == "m" else n * width)
    return lambda operands: size


def _rotary(load: Load, i: int, m: int, n: int, device: torch.device) -> Feed:
    head_dim = int(load.detail[0])
    columns = period(head_dim)
    return lambda operands: arrays.rotary(operands[i], operands[i + 1], head_dim, columns)


def _turns(load: Load, i: int, m: int, n: int, device: torch.device) -> Feed:
    head_dim, rotary_dim, heads = (int(x) for x in load.detail)
    return lambda operands: arrays.turning(n, head_dim, rotary_dim, heads, device)


def _of_operand(make: Callable[[Tensor], Tensor], load: Load | None, i: int, *rest: object) -> Feed:
    return lambda operands: make(operands[i])


#: From a load to its feed, by port: (load, position of the operand, M, N, device).
_FEEDS: dict[str, Callable[..., Feed]] = {
    "col": partial(_of_operand, arrays.vector),
    "scalar": partial(_of_operand, arrays.number),
    "onehot": partial(_of_operand, arrays.indices),
    "extent": _extent,
    "rotary": _rotary,
    "turns": _turns,
    "valid_n": lambda load, i, m, n, device: lambda operands: arrays.ones(n, device),
    "valid_m": lambda load, i, m, n, device: lambda operands: arrays.ones(m, device),
}
