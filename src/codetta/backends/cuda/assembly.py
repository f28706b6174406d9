"""One call described: which arrays the kernel gets, and how its buffers become results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from codetta.backends.cuda import feeds
from codetta.backends.cuda.configs import Configuration, choose, layout_of
from codetta.backends.cuda.feeds import Feed
from codetta.backends.cuda.forms import MAINLOOP, PAIR, STATES, Lowered, Partials, Sink, storage
from codetta.backends.cuda.lowering import lower
from codetta.backends.cuda.rules import NotLowerable
from codetta.backends.precision import fp8_fast
from codetta.language.meaning import NAMED_DTYPES
from codetta.language.primitives import REDUCTION
from codetta.language.program import Program
from codetta.language.types import Kind


@dataclass(frozen=True, slots=True)
class Memory:
    """What a store or a sink is written to.

    Attributes:
        name: of the parameter; "" for D.
        shape: as allocated.
        columns: how many the program asks for, where the memory has more of them.
        whole: the kernel is given all of the memory; half-width stores come in whole 16 bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    columns: int | None = None
    whole: bool = False

    def kept(self, x: Tensor) -> Tensor:
        return x if self.columns is None else x[:, : self.columns]


def _not_compiled(*arguments: Any) -> None:
    raise AssertionError("the call has no kernel yet")


@dataclass(frozen=True)
class Call:
    """A description of calls with equal shapes, strides, dtypes and alignments.

    Attributes:
        feeds: what the kernel's parameters are made of, by name.
        stores: by output name; ``sinks`` by sink name. ``d`` is the output that is D.
        selects: sinks whose memory must be filled first, with the name of their index.
        shared: raw partials may share memory.
    """

    lowered: Lowered
    config: Configuration
    sizes: tuple[int, int]
    device: torch.device
    feed_a: Callable[[Tensor], Tensor]
    feed_b: Callable[[Tensor], Tensor]
    feed_c: Feed | None
    feeds: tuple[tuple[str, Feed], ...]
    stores: tuple[tuple[str, Memory], ...]
    sinks: tuple[Memory, ...]
    selects: tuple[tuple[str, str], ...]
    shared: bool
    plan: Any = None
    launch: Callable[..., None] = _not_compiled

    def compiled(self, a: Tensor, b: Tensor, operands: Sequence[Tensor]) -> Call:
        """The call with its kernel; only the metadata of the tensors counts."""
        a, b, d, c, arguments = self.given(a, b, operands)
        from codetta.backends.cuda import plans, quack  # imports QuACK

        options = fp8_options(a) | {"program": self.lowered.program.name}
        plan = plans.kernel(self.lowered.source, self.config, a, b, d, c, arguments, **options)
        return replace(self, plan=plan, launch=quack.launch)

    def identity(self, a: Tensor, b: Tensor, operands: Sequence[Tensor]) -> tuple[object, ...]:
        """Calls with equal identities are served by one kernel."""
        *matrices, arguments = self.given(a, b, operands)
        kinds = tuple((name, kind(x)) for name, x in arguments.items())
        options = sorted(fp8_options(a).items())
        return (self.lowered.source, self.config.data(), *map(kind, matrices), kinds, options)

    def given(self, a: Tensor, b: Tensor, operands: Sequence[Tensor]) -> tuple[Any, ...]:
        """A, B, D, C, and parameters and memory by name, as the kernel is built for."""
        arguments, d = self.prepare(operands)
        for _, memory in self.stores:
            if memory.whole:
                arguments[memory.name] = memory.kept(arguments[memory.name])
        c = self.feed_c(operands) if self.feed_c is not None else None
        return self.feed_a(a), self.feed_b(b), d, c, arguments

    def prepare(self, operands: Sequence[Tensor]) -> tuple[dict[str, Any], Any]:
        """Parameters and memory by name, and D."""
        device = self.device
        arguments = {name: feed(operands) for name, feed in self.feeds}
        for sink in self.sinks:
            arguments[sink.name] = torch.empty(sink.shape, dtype=sink.dtype, device=device)
        for sink_name, index_name in self.selects:
            self.start_select(arguments[sink_name], arguments[index_name])
        d: Any = None
        for _, memory in self.stores:
            x = torch.empty(memory.shape, dtype=memory.dtype, device=device)
            x = x if memory.whole else memory.kept(x)
            if memory.name:
                arguments[memory.name] = x
            else:
                d = x
        return arguments, d

    def start_select(self, sink: Tensor, index: Tensor) -> None:
        """-Inf, the one value that the kernel leaves out, where a column is selected; else 0."""
        torch.log(index.clamp(0, self.sizes[1] - 1) != index, out=sink)  # of 0 and 1

    def components(self, p: Partials) -> int:
        """Number of tensors that are the raw partial."""
        return len(REDUCTION[self.lowered.program.nodes[p.node].op].components)

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
        if first.ndim == 3:
            return first.unbind(0)[: self.components(p)]
        return (first[:, None] if first.ndim == 1 else first,)


def kind(x: Any) -> object:
    """What a kernel is specialized for: dtype, rank, the contiguous axis, a table's width."""
    if not isinstance(x, Tensor):
        return None if x is None else "number"
    return x.dtype, x.ndim, x.stride(-1) == 1


def fp8_options(a: Tensor) -> dict[str, Any]:
    """Of QuACK's build: for fp8 its own default is to add up outside of the tensor cores."""
    if a.element_size() > 1:
        return {}
    return {"attributes": (("fp8_slow_accum", not fp8_fast()),)}


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
    call = outline(program, a, b, operands, tile, config=config, vectorize=vectorize)
    return call.compiled(a, b, operands)


def outline(
    program: Program,
    a: Tensor,
    b: Tensor,
    operands: Sequence[Tensor],
    tile: tuple[int, int] | None = None,
    *,
    config: Configuration | None = None,
    vectorize: bool = True,
    index: int | None = None,
) -> Call:
    """The description of a call without its kernel.

    Args:
        index: the device whose measurements choose the configuration, where it is not a's.

    Raises:
        NotLowerable: with the reason.
    """
    operand, m, n = MAINLOOP[a.dtype], a.shape[0], b.shape[1]
    plain = lower(program, operand, vectorize=vectorize)
    wide = _loads_fp32(program, operands)
    plain = replace(plain, wide=True) if wide else plain
    if config is None:
        shape = m, n, a.shape[1]
        device = a.device.index if index is None else index
        config = choose(plain, *shape, layout_of(a, b), tile, device, operands)
    if config is None:
        raise NotLowerable(f"no configuration with the tile {tile}")
    over = {s.over for s in plain.sinks}
    extents = {"n": n % config.tile_n, "m": m % config.tile_m}
    ragged = frozenset(axis for axis in over if extents[axis])
    lowered = lower(program, operand, ragged, vectorize=vectorize) if ragged else plain
    lowered = replace(lowered, wide=True) if wide and ragged else lowered
    return Call(
        lowered,
        config,
        (m, n),
        a.device,
        *feeds.sides(a, b),
        feeds.c_feed(lowered, operands),
        feeds.all_feeds(lowered, operands, m, n, a.device, partial=bool(extents["n"])),
        _stores(lowered, m, n),
        tuple(_sink(s, config, m, n) for s in lowered.sinks),
        tuple((s.name, s.index) for s in lowered.sinks if s.fold == "select"),
        _shared(lowered),
    )


def _loads_fp32(program: Program, operands: Sequence[Tensor]) -> bool:
    """Whether a matrix operand is fp32; ``operands`` are flat, a rotary one being two tensors."""
    flat = iter(operands)
    for o in program.operands:
        x = next(flat)
        if o.kind is Kind.ROTARY:
            next(flat)
        elif o.kind is Kind.TILE and x.dtype is torch.float32:
            return True
    return False


def _stores(lowered: Lowered, m: int, n: int) -> tuple[tuple[str, Memory], ...]:
    """Memory of the stores, by output name. TMA wants pitches in whole 16 bytes."""
    named = [("", lowered.d)] if lowered.d is not None else []
    found = []
    for name, out in [*named, *lowered.aux]:
        width = lowered.program.nodes[out.node].type.cols
        cols = n * width.numerator // width.denominator
        dtype = NAMED_DTYPES[storage(out.dtype, lowered.operand)]
        per = 16 // dtype.itemsize
        whole = -(-cols // per) * per
        narrower = bool(name) and lowered.mode == PAIR
        padded = cols if whole > cols else None
        found.append((out.name, Memory(name, (m, whole), dtype, padded, narrower)))
    return tuple(found)


def _sink(sink: Sink, config: Configuration, m: int, n: int) -> Memory:
    shape: tuple[int, ...] = (m, -(-n // config.tile_n))
    if sink.fold == "select":
        shape = (m,)
    elif sink.over == "m":
        shape = (-(-m // config.tile_m), n)
    elif sink.fold in STATES:
        shape = (STATES[sink.fold], *shape)
    return Memory(sink.name, shape, torch.float32)


def _shared(lowered: Lowered) -> bool:
    """Whether raw partials may share memory: planes of one buffer, or two reductions of one."""
    used = [name for p in lowered.partials for name in p.sinks]
    return len(set(used)) < len(used) or any(STATES.get(s.fold, 0) > 1 for s in lowered.sinks)
