"""Epilogue operations of sums in 24 and 20 bits (short_sum.py).

:class:`ThirdByteLoad` and :class:`ThirdByteStore` are the byte below bf16 of fp32 numbers,
:class:`NibbleLoad` and :class:`NibbleStore` the four bits below; see
:mod:`codetta.backends.short_sums` for where they lie. The key of each holds the hash of this file,
as in operations.py.
"""

from __future__ import annotations

import hashlib
from copy import copy
from pathlib import Path
from typing import Any

from codetta.backends.cuda.quack import (
    F2,
    Float32,
    TileLoad,
    TileStore,
    bitcast_int32,
    bitcast_number,
    copy_utils,
    cute,
    cutlass,
    permuted_bytes,
)

_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def upper_half(x: Any) -> Any:
    """x without the lower 16 bits: a number that bf16 holds, not rounded."""
    return bitcast_number(bitcast_int32(x) & cutlass.Int32(-65536))


def joined(high: Any, third: Any) -> Any:
    """The number whose upper half is that of ``high`` and whose third byte :class:`ThirdByteLoad`
    or :class:`NibbleLoad` has read."""
    return bitcast_number(bitcast_int32(high) | bitcast_int32(third))


def rounded_to_20_bits(x: Any) -> Any:
    """A number whose upper 20 bits are x rounded to nearest; NaN is left as it is."""
    bits = bitcast_int32(x)
    return bitcast_number(cutlass.select_(x == x, bits + cutlass.Int32(0x800), bits))


def both_lanes(lane: Any, *arguments: Any) -> Any:
    """``lane`` of the arguments, or of each half of them where they come as packed pairs."""
    if not isinstance(arguments[0], tuple):
        return lane(*arguments)
    first, second = (lane(*(x[i] for x in arguments)) for i in (0, 1))
    return {name: F2(first[name], second[name]) for name in first}


class ThirdByteLoad(TileLoad):
    """A matrix of bytes; the function gets fp32 numbers with them as bits 8 to 15, else 0."""

    def config_key(self) -> tuple[Any, ...]:
        return (*super().config_key(), _SOURCE)

    def begin_loop(self, gemm: Any, state: Any, epi_coord: Any) -> Any:
        loaded = state.tRS_rTile
        pairs = cute.recast_tensor(loaded, cutlass.Uint16)  # neighbours in a row
        numbers = cute.make_rmem_tensor(loaded.layout, Float32)
        zero = cutlass.Int32(0)
        for i in range(cute.size(pairs)):
            pair = cutlass.Int32(pairs[i])
            for j in (0, 1):
                numbers[2 * i + j] = bitcast_number(permuted_bytes(pair, zero, 0x4404 | j << 4))
        return numbers


class ThirdByteStore(TileStore):
    """Bits 8 to 15 of fp32 numbers as a matrix of bytes."""

    def config_key(self) -> tuple[Any, ...]:
        return (*super().config_key(), _SOURCE)

    def store_convert(
        self,
        gemm: Any,
        numbers: Any,
        sr_seed: Any,
        tidx: Any,
        tile_coord_mnkl: Any,
        num_prev_subtiles: Any,
        epi_idx: Any,
    ) -> Any:
        stored = cute.make_rmem_tensor(numbers.layout, cutlass.Uint8)
        pairs = cute.recast_tensor(stored, cutlass.Uint16)
        for i in range(cute.size(pairs)):
            first, second = (bitcast_int32(numbers[2 * i + j]) for j in (0, 1))
            pairs[i] = cutlass.Uint16(permuted_bytes(first, second, 0x4451))
        return stored


def _half_as_wide(gemm: Any, epi_tile: Any) -> Any:
    """The part of a matrix of nibbles that belongs to a part of the output."""
    return epi_tile[0], epi_tile[1] // 2


def _copy_half(
    operation: Any, gemm: Any, params: Any, smem_tensor: Any, coordinates: Any, varlen_manager: Any
) -> Any:
    """QuACK's copy of a tile between memory and shared memory, of half as many columns."""
    rows, columns = gemm.cta_tile_shape_mnk[:2]
    made, _, _ = gemm.epilog_gmem_copy_and_partition(
        getattr(params, operation._tma_atom_key()),
        varlen_manager.offset_batch_epi(getattr(params, operation.name), coordinates[3]),
        (rows, columns // 2),
        getattr(params, operation._epi_tile_key()),
        smem_tensor,
        coordinates,
    )
    return made


#: Of two bytes side by side, the lower four bits of each.
_LOWER = 0x0F0F


class NibbleLoad(TileLoad):
    """A matrix of nibbles, two in a byte; the function gets fp32 numbers with them as bits 12 to
    15, else 0.

    Of 32 columns of the output, column c and c + 16 share byte c of 16: the lower and the upper
    half of it. So a thread, which has two columns side by side in both, packs what is its own.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, epi_tile_fn=_half_as_wide)

    def config_key(self) -> tuple[Any, ...]:
        return (*super().config_key(), _SOURCE)

    def load_g2s_copy_fn(
        self,
        gemm: Any,
        params: Any,
        smem_tensor: Any,
        tile_coord_mnkl: Any,
        varlen_manager: Any,
        epi_pipeline: Any,
    ) -> Any:
        copy_tile = _copy_half(self, gemm, params, smem_tensor, tile_coord_mnkl, varlen_manager)
        return copy_utils.tma_producer_copy_fn(copy_tile, epi_pipeline)

    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        values, rows, columns = ctx.tRS_rD_layout.shape
        half = cute.make_layout((values, rows, columns // 2))
        narrowed = copy(ctx)
        narrowed.tRS_rD_layout = half
        return super().begin(gemm, param, smem_tensor, narrowed)

    def begin_loop(self, gemm: Any, state: Any, epi_coord: Any) -> Any:
        loaded = state.tRS_rTile
        values, rows, columns = loaded.layout.shape
        pairs = cute.recast_tensor(loaded, cutlass.Uint16)
        numbers = cute.make_rmem_tensor((values, rows, 2 * columns), Float32)
        zero, half = cutlass.Int32(0), cute.size(loaded)
        for i in range(cute.size(pairs)):
            pair = cutlass.Int32(pairs[i])
            lower, upper = (pair & cutlass.Int32(_LOWER)) << 4, pair & cutlass.Int32(_LOWER << 4)
            for bits, start in ((lower, 0), (upper, half)):
                for j in (0, 1):
                    one = permuted_bytes(bits, zero, 0x4404 | j << 4)
                    numbers[start + 2 * i + j] = bitcast_number(one)
        return numbers


class NibbleStore(TileStore):
    """Bits 12 to 15 of fp32 numbers as a matrix of nibbles, as :class:`NibbleLoad` reads it."""

    def __init__(self, name: str) -> None:
        super().__init__(name, epi_tile_fn=_half_as_wide)

    def config_key(self) -> tuple[Any, ...]:
        return (*super().config_key(), _SOURCE)

    def store_setup(
        self,
        gemm: Any,
        params: Any,
        smem_tensor: Any,
        tiled_copy_r2s: Any,
        tiled_copy_t2r: Any,
        tile_coord_mnkl: Any,
        varlen_manager: Any,
        tidx: Any,
    ) -> Any:
        to_shared = self._make_tiled_copy_r2s(gemm, params, tiled_copy_r2s, tiled_copy_t2r)
        copy_tile = _copy_half(self, gemm, params, smem_tensor, tile_coord_mnkl, varlen_manager)
        return to_shared, to_shared.get_slice(tidx).partition_D(smem_tensor), copy_tile, None

    def store_convert(
        self,
        gemm: Any,
        numbers: Any,
        sr_seed: Any,
        tidx: Any,
        tile_coord_mnkl: Any,
        num_prev_subtiles: Any,
        epi_idx: Any,
    ) -> Any:
        values, rows, columns = numbers.layout.shape
        stored = cute.make_rmem_tensor((values, rows, columns // 2), cutlass.Uint8)
        pairs = cute.recast_tensor(stored, cutlass.Uint16)
        half = cute.size(stored)
        for i in range(cute.size(pairs)):
            lower, upper = (
                permuted_bytes(bitcast_int32(numbers[k]), bitcast_int32(numbers[k + 1]), 0x4451)
                for k in (2 * i, half + 2 * i)
            )
            lower = (lower >> 4) & cutlass.Int32(_LOWER)
            pairs[i] = cutlass.Uint16(lower | (upper & cutlass.Int32(_LOWER << 4)))
        return stored
