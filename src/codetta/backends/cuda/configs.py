"""Tile configurations of the mainloop on Hopper, and which one a program gets.

What decides is registers before arithmetic: a spilling epilogue costs more than a smaller tile.
Counted from the machine code of quack-kernels 0.6.5 for sm_90a (``STL`` instructions, no GPU
needed; see tests/cuda/test_compile_only.py, which pins the counts):

    spills                            128x192 pp   128x128 pp   256x128 coop
    plain, pairs, rotary                       0            0              0
    one matrix loaded, one sum               142            0              0
    two matrices loaded, two sums            275           13              9
    packed, one sum                          484            0              0
    log-sum-exp                               31            2              0
    two stores, four vectors                  73                           0
    one-hot, three vectors                   136                           0

So 128x192 ping-pong, QuACK's own default, is for epilogues that store one result and reduce
nothing. The order within a family follows times on one H200 at M 16384, bf16 (2026-12-01), against
cuBLAS of the same shape: 0.96 to 1.08 for all but the packed backward, 1.15.

Ping-pong runs two consumer warpgroups on two tiles in turn, so that one's epilogue hides under the
other's mainloop; cooperative gives both one tile, of which each holds half the accumulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from codetta.backends.cuda.forms import ELEMENT, PACKED, PAIR, Lowered


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to tile the output.

    Attributes:
        tile_m, tile_n: of the output, per CTA.
        pingpong: two tiles in turn instead of one together.
        cluster_m, cluster_n: CTAs that share loads.
        max_swizzle: tiles in a group of the raster order.
        provenance: where the choice comes from.
    """

    tile_m: int
    tile_n: int
    pingpong: bool
    cluster_m: int = 2
    cluster_n: int = 1
    max_swizzle: int = 8
    provenance: str = "default"

    @property
    def tile(self) -> tuple[int, int]:
        return self.tile_m, self.tile_n

    def __str__(self) -> str:
        kind = "pp" if self.pingpong else "coop"
        return f"{self.tile_m}x{self.tile_n} {kind} {self.cluster_m}x{self.cluster_n}"


_SPILLS = "spill counts, quack-kernels 0.6.5, sm_90a"


def _pp(tile_m: int, tile_n: int) -> Configuration:
    return Configuration(tile_m, tile_n, True, provenance=_SPILLS)


def _coop(tile_m: int, tile_n: int) -> Configuration:
    return Configuration(tile_m, tile_n, False, provenance=_SPILLS)


#: Configurations by family, best first. Later ones serve where the first is not legal.
FAMILIES: dict[str, tuple[Configuration, ...]] = {
    "plain": (_pp(128, 192), _coop(256, 128), _pp(128, 128), _pp(128, 160), _coop(128, 224)),
    "heavy": (_coop(256, 128), _pp(128, 128), _pp(128, 160), _pp(128, 192), _coop(128, 224)),
    "packed": (_pp(128, 128), _coop(256, 128)),
    "rotary": (_pp(192, 128), _coop(256, 128), _pp(128, 192), _pp(128, 160), _coop(128, 224),
               _coop(128, 256)),
}  # fmt: skip


def family(lowered: Lowered) -> str:
    """The row of FAMILIES for an epilogue."""
    if lowered.head_dims:
        return "rotary"
    if lowered.mode == PACKED:
        return "packed"
    second = lowered.mode == ELEMENT and lowered.aux  # one more tile of results in registers
    onehot = any(x.port == "onehot" for x in lowered.loads)
    heavy = lowered.sinks or lowered.tiles > 1 or second or onehot
    return "heavy" if heavy else "plain"


def illegal(lowered: Lowered, config: Configuration) -> str | None:
    """Why the mainloop cannot run this epilogue in this configuration, or None."""
    m, n = config.tile
    if config.pingpong and (m not in (64, 128, 192) or n > {64: 256, 128: 208, 192: 128}[m]):
        return "ping-pong tiles are 64x256, 128x208 or 192x128 at most"
    if not config.pingpong and (m not in (64, 128, 192, 256, 320) or n > 256):
        return "cooperative tiles have 64, 128, 192, 256 or 320 rows and at most 256 columns"
    if n % 16 or m * n > 256 * 256:
        return "tile_n is a multiple of 16, and the accumulator fits two warpgroups"
    if lowered.mode == PAIR and lowered.aux and n % 32:
        return "half-width stores need tile_n to be a multiple of 32"
    for columns in lowered.head_dims:
        if n % columns and columns % n:
            return f"tile_n is neither multiple nor divisor of {columns} rotary columns"
    return None


def candidates(lowered: Lowered, tile: tuple[int, int] | None = None) -> Iterator[Configuration]:
    """Legal configurations, best first; with ``tile`` those of that tile alone."""
    for config in FAMILIES[family(lowered)]:
        if illegal(lowered, config) is None and tile in (None, config.tile):
            yield config
