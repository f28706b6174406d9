"""One call described: which arrays the kernel gets, and how its buffers become results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from codetta.backends.cuda import arrays
from codetta.backends.cuda.configs import Configuration, candidates
from codetta.backends.cuda.forms import (
    ELEMENT,
    PACKED,
    PAIR,
    Load,
    Lowered,
    Partials,
    Sink,
    period,
    storage,
)
from codetta.backends.cuda.lowering import lower
from codetta.backends.cuda.rules import NotLowerable
from codetta.language.meaning import NAMED_DTYPES
from codetta.language.primitives import REDUCTION
from codetta.language.program import Program
from codetta.language.types import Kind

#: From the call's operands to one parameter of the kernel.
Feed = Callable[[Sequence[Tensor]], Any]
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_LARGEST = 2**31 - 2**16  # coordinates are 32-bit; sizes in elements are not limited
_FP32_INTEGERS = 2**24


@dataclass(frozen=True)
class Call:
    """A description of calls with equal shapes, strides, dtypes and alignments."""

    lowered: Lowered
    config: Configuration
    sizes: tuple[int, int]
    device: torch.device
    feed_a: Callable[[Tensor], Tensor]
    feed_b: Callable[[Tensor], Tensor]
    feed_c: Feed | None
    feeds: tuple[tuple[str, Feed], ...]
    plan: Any = None

    def run(
        self, a: Tensor, b: Tensor, operands: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], dict[int, tuple[Tensor, ...]]]:
        """Launch; stores by output name, and raw partials by node number."""
        from codetta.backends.cuda import quack

        arguments, d, buffers = self.prepare(operands)
        c = self.feed_c(operands) if self.feed_c is not None else None
        quack.launch(self.plan, self.feed_a(a), self.feed_b(b), d, c, arguments)
        return self.stores(d, arguments), self.partials(buffers)

    def compiled(self, a: Tensor, b: Tensor, operands: Sequence[Tensor]) -> Call:
        """The call with its kernel; only the metadata of the tensors counts."""
        from codetta.backends.cuda.plans import kernel

        arguments, d, _ = self.prepare(operands)
        c = self.feed_c(operands) if self.feed_c is not None else None
        a, b = self.feed_a(a), self.feed_b(b)
        plan = kernel(self.lowered.source, self.config, a, b, d, c, arguments)
        return replace(self, plan=plan)

    def prepare(
        self, operands: Sequence[Tensor]
    ) -> tuple[dict[str, Any], Tensor | None, dict[str, Tensor]]:
        """Parameters and buffers by name, and D."""
        arguments = {name: feed(operands) for name, feed in self.feeds}
        buffers = {s.name: self.buffer(s, arguments) for s in self.lowered.sinks}
        arguments.update(buffers)
        for name, out in self.lowered.aux:
            arguments[name] = self.matrix(out.node, out.dtype)
        stored = self.lowered.d
        d = None if stored is None else self.matrix(stored.node, stored.dtype)
        return arguments, d, buffers

    def matrix(self, node: int, dtype: str) -> Tensor:
        width = self.lowered.program.nodes[node].type.cols
        cols = self.sizes[1] * width.numerator // width.denominator
        stored = NAMED_DTYPES[storage(dtype, self.lowered.operand)]
        return arrays.empty_matrix((self.sizes[0], cols), stored, self.device)

    def buffer(self, sink: Sink, arguments: dict[str, Any]) -> Tensor:
        """An uninitialized buffer for a sink; that of a select says what is not written."""
        (m, n), (tile_m, tile_n) = self.sizes, self.config.tile
        planes = {"softmax": 2, "softmean": 3, "moments": 3}.get(sink.fold)
        if sink.fold == "select":  # -Inf is the one value the kernel leaves out
            index = arguments[f"index_{sink.operand}"]
            inside = (index >= 0) & (index < n)
            return torch.zeros(m, device=self.device).masked_fill_(inside, float("-inf"))
        shape = (m, -(-n // tile_n)) if sink.over == "n" else (-(-m // tile_m), n)
        full = shape if planes is None else (planes, *shape)
        return torch.empty(full, dtype=torch.float32, device=self.device)

    # ---- results
    def stores(self, d: Tensor | None, arguments: dict[str, Any]) -> dict[str, Tensor]:
        found = {out.name: arguments[name].contiguous() for name, out in self.lowered.aux}
        if self.lowered.d is not None:
            assert d is not None
            found[self.lowered.d.name] = d.contiguous()
        return found

    def partials(self, buffers: dict[str, Tensor]) -> dict[int, tuple[Tensor, ...]]:
        return {
            p.node: self.parts(p, [buffers[name] for name in p.sinks])
            for p in self.lowered.partials
        }

    def parts(self, p: Partials, buffers: list[Tensor]) -> tuple[Tensor, ...]:
        first = buffers[0]
        if p.how == "nan_max":
            return (first + buffers[1],)
        if p.how == "even":
            return (first[:, ::2].contiguous(),)
        if p.how == "interleave":
            return (torch.stack(buffers, 2).flatten(1),)
        if p.how == "rows":
            m, tile_m = self.sizes[0], self.config.tile_m
            whole = torch.nn.functional.pad(first, (0, 0, 0, -m % tile_m))
            return (whole.reshape(-1, tile_m, first.shape[1]).sum(1),)
        count = len(REDUCTION[self.lowered.program.nodes[p.node].op].components)
        if first.ndim == 3:
            return tuple(first[:count])
        return (first[:, None] if first.ndim == 1 else first,)


# --------------------------------------------------------------------------------- describing
def describe(
    program: Program,
    a: Tensor,
    b: Tensor,
    operands: Sequence[Tensor],
    tile: tuple[int, int] | None = None,
    *,
    config: Configuration | None = None,
    vectorize: bool = True,
) -> Call:
    """The description of a call, its kernel compiled.

    Raises:
        NotLowerable: with the reason.
    """
    operand, m, n = _NAMES[a.dtype], a.shape[0], b.shape[1]
    if max(m, n, a.shape[1]) > _LARGEST:
        raise NotLowerable(f"an extent above {_LARGEST}")
    plain = lower(program, operand, vectorize=vectorize)
    config = config or next(candidates(plain, tile), None)
    if config is None:
        raise NotLowerable(f"no configuration with the tile {tile}")
    over = {s.over for s in plain.sinks}
    extents = {"n": n % config.tile_n, "m": m % config.tile_m}
    ragged = frozenset(axis for axis in over if extents[axis])
    lowered = lower(program, operand, ragged, vectorize=vectorize) if ragged else plain
    at = _positions(program)
    c = next((x for x in lowered.loads if x.port == "c"), None)
    feed_c = None if c is None else _matrix_feed(lowered, c, operands[at[c.operand]], at[c.operand])
    call = Call(
        lowered,
        config,
        (m, n),
        a.device,
        _side(a),
        _side(b),
        feed_c,
        tuple(_feeds(lowered, at, operands, m, n, a.device)),
    )
    return call.compiled(a, b, operands)


def _positions(program: Program) -> dict[str, int]:
    """Where an operand starts in the flat list."""
    found, i = {}, 0
    for o in program.operands:
        found[o.name] = i
        i += 2 if o.kind is Kind.ROTARY else 1
    return found


def _side(x: Tensor) -> Callable[[Tensor], Tensor]:
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


def _feeds(
    lowered: Lowered,
    at: dict[str, int],
    operands: Sequence[Tensor],
    m: int,
    n: int,
    device: torch.device,
) -> list[tuple[str, Feed]]:
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
    return feeds


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
