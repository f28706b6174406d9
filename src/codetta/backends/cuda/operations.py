"""Epilogue operations that QuACK lacks: row maxima, softmax sums, moments, and a column mask.

QuACK's epilogues are extended by an object that owns a resource and joins the function's dataflow
at a port. The sinks here keep several numbers per row in registers, merge them over the lanes that
share the row, and write one plane per number, (planes, M, tiles):

    Maximum       max, NaN where there is one
    SoftmaxSums   (max, Σ e^(x - max)), with a payload also Σ e^(x - max) p      (arXiv 1805.02867)
    Moments       (count, mean, Σ (x - mean)²), merged after Chan, Golub and LeVeque (1983)

QuACK's own maximum drops NaN; a second sink for it would cost as many registers again. Its
log-sum-exp returns max + log Σ and is NaN for a row that holds +Inf; PyTorch's is Inf.
Without ``edges`` the matrix is known to be a multiple of the tile and nothing is masked.

:class:`OneHot` loads an index per row and hands the function 1 at that column, else 0.

QuACK keys cached kernels by a class's name alone, so the key of each operation holds the hash of
this file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from codetta.backends.cuda.quack import (
    ColVecLoad,
    ColVecReduce,
    Float32,
    Scalar,
    cute,
    cutlass,
    layout_utils,
    make_fake_tensor,
)

_INF = float("inf")
Planes = tuple[Any, ...]
_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _select(condition: Any, yes: Any, no: Any) -> Any:
    return Float32(cutlass.select_(condition, Float32(yes), Float32(no)))


class _RowState(ColVecReduce):
    """A sink with ``planes`` numbers per row; subclasses say how they start, fold and merge."""

    planes = 1
    scaled = False

    def __init__(self, name: str, edges: bool) -> None:
        super().__init__(name)
        self.scaled = type(self).scaled
        self.edges = edges
        self._plane = 0

    @property
    def reduce_planes(self) -> int:
        return self.planes

    def config_key(self) -> tuple[Any, ...]:
        return (self.planes, self.scaled, self.edges, _SOURCE)

    # ---- host
    def sink_alloc_shape(
        self, lead: Any, n: int, tile_m: int, tile_n: int, num_seqs: Any = None
    ) -> tuple[int, ...]:
        return (self.planes, lead[-1], -(-n // tile_n))

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        shape = (cute.sym_int(), fctx.m, cute.sym_int())
        return make_fake_tensor(key[0], shape, leading_dim=2)

    # ---- device
    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        tile = (ctx.tile_M, ctx.tile_N)
        per_row = cute.make_layout(tile, stride=(1, 0))
        layout = ctx.partition_for_epilogue_fn(cute.make_rmem_tensor(per_row, Float32)).layout
        state = tuple(cute.make_rmem_tensor(layout, Float32) for _ in range(self.planes))
        coordinates = ctx.partition_for_epilogue_fn(cute.make_identity_tensor(tile))
        limit = ctx.varlen_manager.len_n() - ctx.tile_coord_mnkl[1] * ctx.tile_N
        return state, smem_tensor, coordinates, limit

    def _end_loop_values(self, state: Any, epi_coord: Any) -> Any:
        return tuple(x[None, None, None, epi_coord[0], epi_coord[1]] for x in state[0])

    def _end_loop_smem(self, state: Any) -> Any:
        return state[1]

    def begin_loop(self, gemm: Any, state: Any, epi_coord: Any) -> Any:
        values = self._end_loop_values(state, epi_coord)
        if epi_coord[1] == 0:
            for x, start in zip(values, self.start, strict=True):
                cute.filter_zeros(x).fill(start)
        return values, state[2][None, None, None, epi_coord[0], epi_coord[1]], state[3]

    def fn_sink_flush(self, gemm: Any, state: Any, frag: Any, scale: Any = None) -> None:
        values, coordinates, limit = state
        layout = values[0].layout
        slots = [layout_utils.convert_layout_zero_stride(x, layout)[None, 0] for x in values]
        x, where = (layout_utils.convert_layout_zero_stride(t, layout) for t in (frag, coordinates))
        p = None if scale is None else layout_utils.convert_layout_zero_stride(scale, layout)
        count = cute.size(x, mode=[1])
        for s in range(cute.size(slots[0])):
            inside = [where[s, j][1] < limit if self.edges else None for j in range(count)]
            payload = None if p is None else [p[s, j] for j in range(count)]
            new = self.folded([x[s, j] for j in range(count)], payload, inside)
            for slot, merged in zip(slots, self._merge([y[s] for y in slots], new), strict=True):
                slot[s] = merged

    def _finalize(self, vals: Any) -> Any:
        return vals[self._plane]

    def end_loop_finish(
        self, gemm: Any, param: Any, staged: Any, tile_coord_mnkl: Any, varlen_manager: Any
    ) -> None:
        assert staged[3] == 1, "a row's columns lie in several warps: planes would merge repeatedly"
        for plane in range(self.planes):  # the batch coordinate of the base class is our plane
            self._plane = plane
            at = (*tile_coord_mnkl[:3], plane)
            super().end_loop_finish(gemm, param, staged, at, varlen_manager)

    # ---- what a subclass says
    start: tuple[float, ...] = ()

    def folded(self, xs: list[Any], payload: list[Any] | None, inside: list[Any]) -> Planes:
        """State of these values of one row; ``inside`` holds a condition each, or None."""
        raise NotImplementedError

    def _merge(self, vals: Any, others: Any) -> Planes:
        raise NotImplementedError


class Maximum(_RowState):
    """The largest value, NaN if there is a NaN, as in PyTorch."""

    start: tuple[float, ...] = (-_INF,)

    def folded(self, xs: list[Any], payload: list[Any] | None, inside: list[Any]) -> Planes:
        maximum = Float32(-_INF)
        for x, i in zip(xs, inside, strict=True):
            x = x if i is None else _select(i, x, -_INF)
            maximum = cute.arch.fmax(maximum, x, nan=True)
        return (maximum,)

    def _merge(self, vals: Any, others: Any) -> Planes:
        return (cute.arch.fmax(vals[0], others[0], nan=True),)


class SoftmaxSums(_RowState):
    """(max, Σ e^(x - shift)); shift is max where that is finite, else 0."""

    planes = 2
    start: tuple[float, ...] = (-_INF, 0.0)

    def folded(self, xs: list[Any], payload: list[Any] | None, inside: list[Any]) -> Planes:
        xs = [x if i is None else _select(i, x, -_INF) for x, i in zip(xs, inside, strict=True)]
        maximum = xs[0]
        for x in xs[1:]:
            maximum = cute.arch.fmax(maximum, x)
        shift = _shift(maximum)
        total, weighted = Float32(0.0), Float32(0.0)
        for j, x in enumerate(xs):
            weight = cute.math.exp(x - shift, fastmath=True)
            total = total + weight
            if payload is not None:  # 0 times an infinite payload is 0
                weighted = weighted + _select(weight == 0.0, 0.0, weight * payload[j])
        return (maximum, total, weighted)[: self.planes]

    def _merge(self, vals: Any, others: Any) -> Planes:
        maximum = cute.arch.fmax(vals[0], others[0])
        shift = _shift(maximum)
        ours, theirs = (
            cute.math.exp(_shift(m) - shift, fastmath=True) for m in (vals[0], others[0])
        )
        sums = (
            _scaled(a, ours) + _scaled(b, theirs) for a, b in zip(vals[1:], others[1:], strict=True)
        )
        return (maximum, *sums)


class SoftmaxMean(SoftmaxSums):
    """SoftmaxSums and Σ e^(x - shift) p; the function returns (x, p)."""

    planes = 3
    start = (-_INF, 0.0, 0.0)
    scaled = True


def _shift(maximum: Any) -> Any:
    infinite = (maximum == _INF) | (maximum == -_INF)
    return _select(infinite, 0.0, maximum)


def _scaled(total: Any, scale: Any) -> Any:
    """0 stays 0, whatever the scale: that of a tile of -Inf may overflow."""
    return _select(total == 0.0, 0.0, total * scale)


class Moments(_RowState):
    """(count, mean, Σ (x - mean)²) of each row's columns in the tile."""

    planes = 3
    start = (0.0, 0.0, 0.0)

    def folded(self, xs: list[Any], payload: list[Any] | None, inside: list[Any]) -> Planes:
        if inside[0] is None:
            count, share = Float32(float(len(xs))), Float32(1.0 / len(xs))
        else:
            count = Float32(0.0)
            for i in inside:
                count = count + _select(i, 1.0, 0.0)
            share = _select(count > 0.0, 1.0 / count, 0.0)
        mean = Float32(0.0)
        for x, i in zip(xs, inside, strict=True):
            mean = mean + (x if i is None else _select(i, x, 0.0))
        mean = mean * share
        squares = Float32(0.0)
        for x, i in zip(xs, inside, strict=True):
            deviation = x - mean if i is None else _select(i, x - mean, 0.0)
            squares = squares + deviation * deviation
        return count, mean, squares

    def _merge(self, vals: Any, others: Any) -> Planes:
        (n, mean, m2), (n_other, mean_other, m2_other) = vals, others
        count = n + n_other
        share = _select(count > 0.0, n_other * cute.math.rcp(count, approx=True, ftz=True), 0.0)
        delta = mean_other - mean
        # An infinite mean stays, on either side: inf + (x - inf) * share would be NaN.
        finite = delta - delta == 0.0
        merged = _select(finite, mean + delta * share, mean + mean_other)
        # In this order 0 columns times a square that overflows are 0, and not NaN.
        return count, merged, m2 + m2_other + delta * (delta * (n * share))


class Number(Scalar):
    """A Scalar whose tensor the caller has checked; QuACK's checks it again at each launch."""

    def config_key(self) -> tuple[Any, ...]:
        return (_SOURCE,)

    def _validate_pointer_value(self, value: Any) -> None:
        return None


class OneHot(ColVecLoad):
    """1 where a column's number is the row's index, else 0; indices as an integer vector (M,).

    Compared as fp32, which is exact below 2^24 columns.
    """

    fn_port = "value"

    def config_key(self) -> tuple[Any, ...]:
        return (_SOURCE,)

    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        loaded = super().begin(gemm, param, smem_tensor, ctx)
        tile = (ctx.tile_M, ctx.tile_N)
        coordinates = ctx.partition_for_epilogue_fn(cute.make_identity_tensor(tile))
        if ctx.tiled_copy_t2r is not None:
            coordinates = ctx.tiled_copy_r2s.retile(coordinates)
        return [*loaded, coordinates, ctx.tile_coord_mnkl[1] * ctx.tile_N]

    def begin_loop(self, gemm: Any, state: Any, epi_coord: Any) -> Any:
        index = super().begin_loop(gemm, state[:2], epi_coord)
        at = state[2][None, None, None, epi_coord[0], epi_coord[1]]
        hit = cute.make_rmem_tensor(index.layout.shape, gemm.acc_dtype)
        for i in range(cute.size(hit)):
            hit[i] = _select(Float32(at[i][1] + state[3]) == index[i], 1.0, 0.0)
        return hit
