"""Tile configurations of the mainloop on Hopper, and which one a kernel gets.

Looked up in this order: the configuration in force (:class:`use_configuration`), the user's own
measurements (:mod:`.config_cache`), those that come with the package (:mod:`.shipped`), and
:func:`safe_default`. Each of them is taken only if it is legal for the epilogue; a tile that the
caller asked for restricts all of them.

Two static facts decide more than arithmetic. **Spills**: an epilogue that does not fit the
registers costs more than a smaller tile. **A/B stages** (:func:`ab_stages`): every matrix that the
epilogue loads or stores takes shared memory from the pipeline that feeds the tensor cores; with
two stages left a kernel takes twice its time, with one it hardly overlaps anything.

Ping-pong runs two consumer warpgroups on two tiles in turn, so that one's epilogue hides under the
other's mainloop; cooperative gives both one tile, of which each holds half the accumulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

from torch import Tensor

from codetta.backends.cuda.forms import ELEMENT, PACKED, PAIR, Lowered, storage
from codetta.language.meaning import NAMED_DTYPES

_SHARED_MEMORY = 227 * 1024  # bytes per CTA on Hopper
_TILE_K = 64  # columns of A and B per stage, 16-bit
_BARRIERS = 1024


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to tile the output.

    Attributes:
        tile_m, tile_n: of the output, per CTA.
        pingpong: two tiles in turn instead of one together.
        cluster_m, cluster_n: CTAs that share loads.
        max_swizzle: tiles in a group of the raster order.
        epi_n: columns that the epilogue handles at a time; 0 leaves 32. With 16 each buffered piece
            of a loaded matrix is half as large, and A and B get the memory.
        provenance: where the choice comes from.
    """

    tile_m: int
    tile_n: int
    pingpong: bool
    cluster_m: int = 2
    cluster_n: int = 1
    max_swizzle: int = 8
    epi_n: int = 0
    provenance: str = "default"

    @property
    def tile(self) -> tuple[int, int]:
        return self.tile_m, self.tile_n

    def __str__(self) -> str:
        kind = "pp" if self.pingpong else "coop"
        narrow = f" epi{self.epi_n}" if self.epi_n else ""
        return f"{self.tile_m}x{self.tile_n} {kind} {self.cluster_m}x{self.cluster_n}{narrow}"

    @property
    def code(self) -> str:
        """The expression that makes this configuration."""
        given = {"cluster_m": 2, "cluster_n": 1, "max_swizzle": 8, "epi_n": 0}
        rest = [f"{n}={getattr(self, n)}" for n, d in given.items() if getattr(self, n) != d]
        head = f"{self.tile_m}, {self.tile_n}, pingpong={self.pingpong}"
        return f"Configuration({', '.join([head, *rest])})"

    def data(self) -> dict[str, Any]:
        """As plain data, without provenance."""
        found = asdict(self)
        del found["provenance"]
        return found

    @staticmethod
    def of(data: Any, provenance: str) -> Configuration | None:
        """The configuration of plain data, or None if that is not what it is."""
        if not isinstance(data, dict):
            return None
        kinds = {n: type(v) for n, v in Configuration(0, 0, False).data().items()}
        if set(data) != set(kinds) or any(type(data[n]) is not k for n, k in kinds.items()):
            return None
        return Configuration(**data, provenance=provenance)


# Set by use_configuration, for tuning and for hard-coded winners.
_IN_FORCE: ContextVar[Configuration | None] = ContextVar("codetta_configuration", default=None)


class use_configuration:
    """Run the fused kernels in this configuration, for the duration of a ``with`` block.

        with codetta.use_configuration(codetta.Configuration(128, 128, pingpong=True)):
            out = codetta.gemm(a, b, epilogue)

    A kernel for which it is not legal takes the one it would take anyway. Follows the rules of
    ``contextvars``: other threads and tasks are not affected.
    """

    def __init__(self, config: Configuration) -> None:
        self.config = config

    def __enter__(self) -> use_configuration:
        self._token = _IN_FORCE.set(self.config)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _IN_FORCE.reset(self._token)


def in_force() -> Configuration | None:
    """The configuration of the innermost ``use_configuration`` block."""
    return _IN_FORCE.get()


#: Called with what each choice is made for: tuning learns the kernels of a step from it.
_RECORDERS: list[Callable[..., None]] = []


@contextmanager
def recording(recorder: Callable[..., None]) -> Iterator[None]:
    """Call ``recorder(lowered, m, n, k, layout, operands)`` for each choice, on any thread."""
    _RECORDERS.append(recorder)
    try:
        yield
    finally:
        _RECORDERS.remove(recorder)


# ------------------------------------------------------------------------------------ legality
def illegal(lowered: Lowered, config: Configuration) -> str | None:
    """Why the mainloop cannot run this epilogue in this configuration, or None."""
    m, n = config.tile
    if min(m, n, config.cluster_m, config.cluster_n, config.max_swizzle) < 1:
        return "extents are positive"
    if config.pingpong and (m not in (64, 128, 192) or n > {64: 256, 128: 208, 192: 128}[m]):
        return "ping-pong tiles are 64x256, 128x208 or 192x128 at most"
    if not config.pingpong and (m not in (64, 128, 192, 256, 320) or n > 256):
        return "cooperative tiles have 64, 128, 192, 256 or 320 rows and at most 256 columns"
    if not config.pingpong and m in (192, 320) and (n % 32 or n > {192: 256, 320: 160}[m]):
        return "cooperative tiles of 192 or 320 rows have 32 k columns, 256 or 160 at most"
    if n % 16 or m * n > 256 * 208:
        return "tile_n is a multiple of 16, and the accumulator fits two warpgroups"
    if config.cluster_m * config.cluster_n > 2:
        return "at most two CTAs share loads"
    if config.epi_n not in (0, 16) or (config.epi_n and lowered.mode != ELEMENT):
        return "the epilogue handles 32 columns at a time, or 16 where no pairs are involved"
    if lowered.mode == PAIR and lowered.aux and n % 32:
        return "half-width stores need tile_n to be a multiple of 32"
    for columns in lowered.head_dims:
        if n % columns and columns % n:
            return f"tile_n is neither multiple nor divisor of {columns} rotary columns"
    if ab_stages(lowered, config) < 2:
        return "the epilogue's buffers leave no room to overlap loads with the tensor cores"
    return None


def ab_stages(lowered: Lowered, config: Configuration) -> int:
    """Stages of the A/B pipeline, from the shared memory that the epilogue leaves.

    The same sum as quack-kernels 0.6.5 does when it compiles: two to four buffered pieces per store
    and four per load, each of one epilogue tile, next to vectors and the partials of warps.
    """
    epi_m, epi_n = _epilogue_tile(config)
    pieces = (config.tile_m * config.tile_n) // (epi_m * epi_n)
    size = epi_m * epi_n
    loaded = 4 if lowered.wide else 2
    wide = 4 if lowered.mode == PACKED else 2  # C and D of a packed epilogue are pairs
    store = load = vectors = 0
    if lowered.d is not None:
        store += size * (wide if lowered.mode == PACKED else _bytes(lowered, lowered.d.dtype))
    for _, out in lowered.aux:
        half = 2 if lowered.mode == PAIR else 1
        store += size // half * _bytes(lowered, out.dtype)
    for x in lowered.loads:
        if x.port == "c":
            load += size * wide * loaded // 2
        elif x.port in ("tile", "rotary"):
            load += size * (4 if x.port == "rotary" else loaded)
        elif x.port in ("row", "turns", "valid_n"):
            vectors += 4 * config.tile_n
        elif x.port in ("col", "valid_m", "onehot"):
            vectors += 4 * config.tile_m
    warps = 4 if config.pingpong else (config.tile_m + 63) // 64 * 4
    for sink in lowered.sinks:
        if sink.over == "m":
            vectors += 4 * config.tile_n * (min(warps, 8) - 1)
    stores = min(pieces, 4 if epi_n <= 16 else 2)
    used = _BARRIERS * 2 + vectors + store * stores + load * min(pieces, 4)
    return max((_SHARED_MEMORY - used) // (2 * _TILE_K * (config.tile_m + config.tile_n)), 0)


def _bytes(lowered: Lowered, dtype: str) -> int:
    return NAMED_DTYPES[storage(dtype, lowered.operand)].itemsize


def _epilogue_tile(config: Configuration) -> tuple[int, int]:
    """Rows and columns of the output that the epilogue handles at a time."""
    columns = math.gcd(config.epi_n or 32, config.tile_n)
    if config.pingpong or config.tile_m in (64, 320):
        return 64, columns
    if config.tile_m == 192:
        return (192 if config.tile_n <= 128 else 64), columns
    return 128, columns


# -------------------------------------------------------------------------------------- choice
def family(lowered: Lowered) -> str:
    """What tiling depends on: the form, what is loaded, stored and reduced per tile.

    For example ``element load2 store1`` or ``packed load1 store2 sum_n1``; with fp8 operands, whose
    tensor cores are twice as fast, ``fp8 element store1``.
    """
    form = {ELEMENT: "element", PAIR: "pair", PACKED: "packed"}[lowered.mode]
    rotary = sum(x.port == "rotary" for x in lowered.loads)
    sums = sum(s.over == "n" and s.fold == "add" for s in lowered.sinks)
    folds = sum(s.over == "n" and s.fold != "add" for s in lowered.sinks)
    tight = rotary or (sums and folds)  # a row vector decides what spills there
    counts = {
        "load": lowered.tiles - rotary,
        "rotary": rotary,
        "row": tight and sum(x.port == "row" for x in lowered.loads),
        "store": (lowered.d is not None) + len(lowered.aux),
        "sum_n": sums,
        "fold_n": folds,
        "sum_m": sum(s.over == "m" for s in lowered.sinks),
        "onehot": sum(x.port == "onehot" for x in lowered.loads),
    }
    found = " ".join([form, *(f"{name}{count}" for name, count in counts.items() if count)])
    return f"fp8 {found}" if lowered.operand == "fp8" else found


#: Tried in this order by safe_default where nothing else decides: what measured best over the
#: families of a layer first.
_SAFE = (
    Configuration(128, 192, True), Configuration(256, 128, False), Configuration(192, 128, True),
    Configuration(128, 128, True), Configuration(128, 160, True), Configuration(128, 224, False),
    Configuration(128, 256, False), Configuration(64, 256, False), Configuration(64, 128, True),
)  # fmt: skip
#: Spilled registers (STL instructions) of quack-kernels 0.6.5 for sm_90a, where there are any, by
#: what the epilogue does: 128x192 ping-pong is for those that store one result and reduce nothing.
_LIGHT = frozenset({"element store1", "pair store1", "pair store2", "element load1 store1"})


#: Multiprocessors of an H100 or H200 SXM.
_PROCESSORS = 132
#: By how much a tile of 64 rows is slower at the same work: a guess, they were never the best.
_NARROW = 0.8
#: A tile that keeps this share of the processors busy that another would is not passed over.
_ENOUGH = 0.93


def _busy(config: Configuration, m: int, n: int) -> float:
    """Share of the processors' time that goes into the output: what the last wave of tiles and the
    tiles that stick out leave idle is missing. Tiles of 64 rows use the tensor cores less."""
    tiles = math.ceil(m / config.tile_m) * math.ceil(n / config.tile_n)
    waves = math.ceil(tiles / _PROCESSORS)
    share = m * n / (waves * _PROCESSORS * config.tile_m * config.tile_n)
    return share * (_NARROW if config.tile_m < 128 else 1.0)


def safe_default(
    lowered: Lowered,
    tile: tuple[int, int] | None = None,
    size: tuple[int, int] | None = None,
) -> Configuration | None:
    """A legal configuration with few spills or none, three A/B stages or more if one has them.

    ``size``: M and N. With few tiles the last wave of them decides: 2048 x 2048 takes two waves of
    128x192 tiles and one of 256x128. M counts as its power of two, so that a few tokens more do
    not mean another kernel. Only for light epilogues: others spill in some tiles at some sizes.
    """
    legal = [c for c in _fitting(_SAFE, tile) if illegal(lowered, c) is None]
    light = family(lowered).removeprefix("fp8 ") in _LIGHT
    if not light and not tile:
        legal = _for_heavy(lowered, legal) or legal
    possible = [c for c in legal if ab_stages(lowered, c) >= 3] or legal
    if size is not None and light and len(possible) > 1:
        m, n = 1 << round(math.log2(max(size[0], 1))), size[1]
        most = max(_busy(c, m, n) for c in possible)
        possible = [c for c in possible if _busy(c, m, n) >= _ENOUGH * most]
    return next(iter(possible), None)


def _for_heavy(lowered: Lowered, legal: Sequence[Configuration]) -> list[Configuration]:
    """Those of ``legal`` in which an epilogue that loads or reduces spills little or nothing.

    First comes 128x128 ping-pong. Of 47 heavy kernels that were measured in both tiles it took 0.97
    of the time of 256x128 cooperative (0.83 to 1.10), of 12 with rotations or loaded pairs 0.53 to
    0.61 (benchmarks/results): cooperative tiles hide nothing of the epilogue.
    """
    found = [c for c in legal if (c.tile, c.pingpong) != ((128, 192), True)]
    # For rotations; beside a bias (92 spills) and elsewhere the registers are too few.
    turns = lowered.head_dims and not any(x.port == "row" for x in lowered.loads)
    found = [c for c in found if turns or c.tile != (192, 128)]
    if lowered.mode == PACKED:  # larger tiles spill
        found = [c for c in found if c.tile_m * c.tile_n <= 128 * 128] or found
    return sorted(found, key=lambda c: (c.tile, c.pingpong) != ((128, 128), True))


def _fitting(
    configs: tuple[Configuration, ...], tile: tuple[int, int] | None
) -> tuple[Configuration, ...]:
    """Those of the tile, or all of them without one; a tile nobody lists is made in both ways."""
    if tile is None:
        return configs
    listed = tuple(c for c in configs if c.tile == tile)
    return listed or tuple(replace(configs[0], tile_m=tile[0], tile_n=tile[1], pingpong=p)
                           for p in (True, False))  # fmt: skip


def candidates(lowered: Lowered, tile: tuple[int, int] | None = None) -> Iterator[Configuration]:
    """Legal configurations without regard to shape, the safe default first."""
    first = safe_default(lowered, tile)
    if first is not None:
        yield first
        for config in _fitting(_SAFE, tile):
            if config != first and illegal(lowered, config) is None:
                yield config


def choose(
    lowered: Lowered,
    m: int,
    n: int,
    k: int,
    layout: str = "nt",
    tile: tuple[int, int] | None = None,
    device: int | None = None,
    operands: Sequence[Tensor] = (),
) -> Configuration | None:
    """The configuration of a GEMM kernel, or None if the mainloop has none.

    Args:
        m, n, k: of the GEMM.
        layout: which axis of a and b is contiguous: 'nt' (K, K), 'nn' (K, N), 'tn' (M, N),
            'tt' (M, K), named as in BLAS for a (M, K) and a weight (N, K).
        tile: the tile the caller asked for; raw partials have its shape.
        device: index of the GPU whose measurements count.
        operands: flat, for their dtypes and majors.
    """
    from codetta.backends.cuda import config_cache, shipped

    for recorder in _RECORDERS:
        recorder(lowered, m, n, k, layout, operands)

    for found in (
        in_force(),
        config_cache.lookup(lowered, m, n, k, layout, operands, device),
        None if lowered.wide else shipped.lookup(family(lowered), m, n, k, layout),
    ):
        if found is not None and tile in (None, found.tile) and illegal(lowered, found) is None:
            return found
    return safe_default(lowered, tile, (m, n))


def layout_of(a: Any, b: Any) -> str:
    """The layout of matrices a (M, K) and b (K, N), as :func:`choose` names it. fp8 kernels read
    both along K, if need be after a copy."""
    if a.element_size() == 1:
        return "nt"
    return ("n" if a.stride(1) == 1 else "t") + ("n" if b.stride(1) == 1 else "t")
