"""Sums of products kept in 24 or 20 bits: in the memory of a bf16 matrix, and one byte or half a
byte per element more (:mod:`codetta.backends.short_sums`).

The upper half of an fp32 number is a bf16 number, so taking a sum apart and putting it together are
byte permutations; its arithmetic is one fp32 addition. The functions are written out here and not
lowered: a program has no bytes. What is chosen for them (tiles, pipeline stages) follows from a
program that loads and stores as much.

    first     nothing is loaded: high and low of a @ b
    further   high and low of the sum of both
    last      the sum rounded to nearest, into high; low is only read

With 20 bits, low is a matrix half as wide as the output: QuACK's tiles for gated outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from codetta.backends.cuda import arrays
from codetta.backends.cuda.assembly import fp8_options
from codetta.backends.cuda.configs import Configuration, choose, layout_of
from codetta.backends.cuda.feeds import sides
from codetta.backends.cuda.forms import Lowered
from codetta.backends.cuda.launch import DTYPES
from codetta.backends.cuda.lowering import lower
from codetta.language import Program, Tile, epilogue, store

_SOURCE = '''\
"""A sum in {bits} bits; a and b in {operand}; {kind}."""

from quack.epilogue.frontend import EpiMod
from codetta.backends.cuda.short_sum_operations import (
    NibbleLoad, NibbleStore, ThirdByteLoad, ThirdByteStore, both_lanes, joined,
    rounded_to_20_bits, upper_half,
)
INF = float("inf")


def lane({parameters}):
    total = {total}
    return {{{results}}}


def epilogue_function({parameters}):
    return both_lanes(lane, {parameters})


epilogue = EpiMod(
    epilogue_function,
    outputs=({outputs}),
    ops={{{loads}}},
    mode='element',
    vectorize=None,
)
'''
FIRST, FURTHER, LAST = "first", "further", "last"


@epilogue
def _first(acc):  # type: ignore[no-untyped-def]
    return {"high": store(acc, "bf16"), "low": store(acc, "e4m3")}


@epilogue
def _further(acc, high: Tile, low: Tile):  # type: ignore[no-untyped-def, valid-type]
    total = acc + high + low
    return {"high": store(total, "bf16"), "low": store(total, "e4m3")}


@epilogue
def _last(acc, high: Tile, low: Tile):  # type: ignore[no-untyped-def, valid-type]
    return store(acc + high + low, "bf16")


#: What loads and stores as much.
_LIKE: dict[str, Program] = {FIRST: _first, FURTHER: _further, LAST: _last}


@cache
def lowered_sum(kind: str, operand: str, bits: int) -> Lowered:
    """One of the three kernels for a and b of a storage dtype."""
    loads, stores = kind != FIRST, kind != LAST
    name, total = ("ThirdByte", "{}") if bits == 24 else ("Nibble", "rounded_to_20_bits({})")
    added = "acc + joined(c, p1)" if loads else "acc"
    text = _SOURCE.format(
        operand=operand,
        bits=bits,
        kind=kind,
        parameters="acc, c, p1" if loads else "acc",
        total=total.format(added) if stores else added,
        results="'D': upper_half(total), 'o0': total" if stores else "'D': total",
        outputs=f"{name}Store('o0')," if stores else "",
        loads=f"'p1': {name}Load('p1')" if loads else "",
    )
    return replace(lower(_LIKE[kind], operand), source=text)


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel with what it is launched on: A, B, D, C, and other matrices by name."""

    lowered: Lowered
    config: Configuration
    plan: Any
    arrays: tuple[Any, ...]


def call(
    kind: str,
    high: Tensor,
    low: Tensor,
    a: Tensor,
    b: Tensor,
    bits: int,
    config: Configuration | None = None,
) -> Call:
    """The kernel of one of the three kinds, compiled if it is not yet; ``config`` instead of the
    one that is chosen."""
    from codetta.backends.cuda import plans

    feed_a, feed_b = sides(a, b)
    a, b = feed_a(a), feed_b(b)
    lowered = lowered_sum(kind, DTYPES[a.dtype], bits)
    read = () if kind == FIRST else (high, low)
    if config is None:
        sizes, index = (a.shape[0], b.shape[1], a.shape[1]), a.device.index
        config = choose(lowered, *sizes, layout_of(a, b), device=index, operands=read)
        assert config is not None
    if bits == 20 and not _packs(config):
        config = replace(config, tile_m=128, tile_n=128, pingpong=True, epi_n=0)
    c = high if read else None
    arguments = ({"p1": low} if read else {}) | ({} if kind == LAST else {"o0": low})
    options = fp8_options(a) | {"program": "gemm_short_sum_"}
    shown = arguments
    if bits == 20:  # QuACK asks for outputs as wide as D, of which a plan knows nothing
        shown = dict.fromkeys(arguments, high.view(torch.uint8)[:, : high.shape[1]])
    plan = plans.kernel(lowered.source, config, a, b, high, c, shown, **options)
    return Call(lowered, config, plan, (a, b, high, c, arguments))


def _packs(config: Configuration) -> bool:
    """Whether a thread has both columns that share a byte: the epilogue takes 32 at a time, and no
    two warp groups share them."""
    halved = not config.pingpong and (config.tile_m, config.tile_n > 128) == (192, True)
    return config.tile_n % 32 == 0 and not config.epi_n and not halved and config.tile_m <= 256


def short_sum_(
    high: Tensor, low: Tensor, a: Tensor, b: Tensor, bits: int, first: bool, last: bool
) -> bool:
    """See :meth:`codetta.backends.select.Backend.gemm_short_sum_`; False, with nothing done, where
    these kernels cannot run."""
    if not all(arrays.is_matrix(x, either=False) for x in (high, low)):
        return False
    from codetta.backends.cuda import quack

    made = call(FIRST if first else LAST if last else FURTHER, high, low, a, b, bits)
    quack.launch(made.plan, *made.arrays)
    return True
