"""The fused backend: one kernel per GEMM program, its finals by one small kernel after it.

A call is described once per set of shapes, strides and alignments (:class:`~.assembly.Call`): the
configuration, what must be copied, which buffers to make, and the compiled kernel. From that comes
one function (bound.py), and a later call is a key, a look-up and that function. Kernels are
compiled once per program, dtypes, majors and configuration, for all M, N and K, so a new M costs a
description, a fraction of a millisecond. Nothing waits for the device, so calls can be captured in
a CUDA graph once they have run; one that would have to compile during a capture is an error.

Kernels count rows and columns in 32 bits, and elements in 64: an extent beyond that is refused.

What QuACK cannot carry (``explain`` says why) is a plain GEMM into fp32 and one kernel over its
result. fp32 and fp64 operands run on the reference backend, on the same device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from codetta.backends.calls import REFERENCE
from codetta.backends.cuda import pointwise
from codetta.backends.cuda.assembly import Call, describe, outline
from codetta.backends.cuda.bound import Finish, Offers, Run, bind, offered, on_device, vectors
from codetta.backends.cuda.capture import capturing
from codetta.backends.cuda.configs import candidates, in_force
from codetta.backends.cuda.finalize import finalizer
from codetta.backends.cuda.forms import MAINLOOP
from codetta.backends.cuda.lowering import lower
from codetta.backends.cuda.rules import NotLowerable
from codetta.backends.layout import compute_dtype, default_tile
from codetta.backends.precision import fp8_fast
from codetta.backends.select import Bound
from codetta.errors import TooLarge
from codetta.language.functions import store
from codetta.language.program import Program
from codetta.language.trace import epilogue
from codetta.language.values import Value

if TYPE_CHECKING:
    from codetta.plan.plan import Plan

DTYPES = MAINLOOP
Key = tuple[object, ...]
LARGEST = 2**31 - 2**16  # the last tile reaches beyond its matrix
_CALLS_KEPT = 4096


@epilogue
def accumulator(acc: Value) -> Value:
    """a @ b in fp32."""
    return store(acc, "accumulator")  # type: ignore[return-value]


def explain(program: Program, operand: str = "bf16") -> str | None:
    """Why a GEMM program is not one kernel here, or None if it is."""
    try:
        lowered = lower(program, operand)
        if next(candidates(lowered), None) is None:
            return "no tile fits its heads"
    except NotLowerable as reason:
        return str(reason)
    return None


def tile_of(
    program: Program,
    a: Tensor,
    b: Tensor,
    operands: Sequence[Tensor],
    device: torch.device | None = None,
) -> tuple[int, int]:
    """The tile that :meth:`CudaBackend.gemm` takes for such tensors on ``device``.

    Nothing is launched or compiled, and the tensors may be meta tensors. Without a device only what
    comes with the package counts, no measurements.
    """
    if not _is_carried(a, b, operands):
        return default_tile(program)
    index = None
    if device is not None and device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    try:
        return outline(program, a, b, operands, index=index).config.tile
    except NotLowerable:  # a kernel over the stored accumulator
        return default_tile(program)


class CudaBackend:
    """GEMM programs on QuACK's mainloop, for 16-bit and fp8 matrices on Hopper."""

    name = "cuda"
    binds = True

    def __init__(self) -> None:
        self._forgotten = 0
        self._calls: dict[Key, Call | None] = {}
        self._runs: tuple[dict[Key, Run], dict[Key, Run]] = {}, {}  # of finals, of raw partials

    # ---- gemm
    def gemm(
        self,
        program: Program,
        a: Tensor,
        b: Tensor,
        operands: Sequence[Tensor],
        tile: tuple[int, int] | None,
        raw: bool,
        into: Mapping[int, Tensor] | None = None,
    ) -> list[Tensor]:
        key, offers = self._key(program, a, b, operands, tile, into)
        run = self._runs[raw].get(key)
        if run is not None:
            return run(a, b, operands)
        call = self._described(key, program, a, b, operands, tile)
        if call is None:
            return self._otherwise(program, a, b, operands, tile, raw)
        with _on(a.device):
            made = on_device(bind(call, raw, _finish(program, a, b), offers), a.device)
            self._runs[raw][key] = made
        return made(a, b, operands)

    def gemm_bound(
        self,
        program: Program,
        a: Tensor,
        b: Tensor,
        operands: Sequence[Tensor],
        tile: tuple[int, int] | None,
        raw: bool,
        into: Mapping[int, Tensor] | None = None,
    ) -> Bound:
        key, offers = self._key(program, a, b, operands, tile, into)
        call = self._described(key, program, a, b, operands, tile)
        if call is None:
            return Bound(lambda a, b, t: self._otherwise(program, a, b, t, tile, raw))
        flat = vectors(call, raw)
        with _on(a.device):
            made = bind(call, raw, _finish(program, a, b), offers, flat)
        return Bound(on_device(made, a.device), flat)

    def _key(
        self,
        program: Program,
        a: Tensor,
        b: Tensor,
        operands: Sequence[Tensor],
        tile: tuple[int, int] | None,
        into: Mapping[int, Tensor] | None,
    ) -> tuple[Key, Offers]:
        fast = a.dtype.itemsize == 1 and fp8_fast()  # another kernel
        forced = in_force()  # another kernel, too
        how = tile if forced is None else (tile, forced)
        key = _key(len(operands))(program.text, how, fast, a, b, operands)
        if not into:
            return key, ()
        offers = offered(into, operands)
        return (*key, offers) if offers else key, offers

    def _described(
        self,
        key: Key,
        program: Program,
        a: Tensor,
        b: Tensor,
        operands: Sequence[Tensor],
        tile: tuple[int, int] | None,
    ) -> Call | None:
        call = self._calls.get(key)
        if call is not None or key in self._calls:
            return call
        if _is_carried(a, b, operands):
            try:
                with _on(a.device):
                    call = describe(program, a, b, operands, tile)
            except NotLowerable:
                call = None
        if len(self._calls) >= _CALLS_KEPT:  # shapes that never end: start over
            self.forget()
        self._calls[key] = call
        return call

    def forget(self) -> None:
        """Describe calls anew: configurations have changed."""
        self._forgotten += 1
        for kept in (self._calls, *self._runs):
            kept.clear()

    def _otherwise(
        self,
        program: Program,
        a: Tensor,
        b: Tensor,
        operands: Sequence[Tensor],
        tile: tuple[int, int] | None,
        raw: bool,
    ) -> list[Tensor]:
        if a.dtype not in DTYPES or compute_dtype(a.dtype, operands) is torch.float64:
            _warn_reference(str(compute_dtype(a.dtype, operands)).removeprefix("torch."))
            return REFERENCE.gemm(program, a, b, operands, tile, raw)
        if not min(*a.shape, *b.shape):
            return REFERENCE.gemm(program, a, b, operands, tile, raw)
        if max(*a.shape, *b.shape) > LARGEST:
            raise TooLarge(program=program.name, given=f"a {tuple(a.shape)}, b {tuple(b.shape)}")
        from codetta.backends.cuda.cut import cut_of

        # Raw partials have the tile and the order of the whole program, which a half does not know.
        cut = None if raw and program.reductions else cut_of(program, a.dtype)
        if cut is not None:
            (stored,) = self.gemm(cut.first, a, b, cut.first_operands(operands), None, False)
            (m, n), given = stored.shape, cut.second_operands(stored, operands)
            rest = pointwise.run(cut.second, given, m, n, a.dtype, torch.float32, tile, raw)
            return cut.results(stored, rest)
        (acc,) = self.gemm(accumulator, a, b, (), None, False)
        return pointwise.on_accumulator(program, acc, operands, a.dtype, tile, raw)

    # ---- the rest
    def pointwise(
        self,
        program: Program,
        operands: Sequence[Tensor],
        m: int,
        n: int,
        operand: torch.dtype,
        compute: torch.dtype,
        tile: tuple[int, int] | None,
        raw: bool,
        into: Mapping[int, Tensor] | None = None,  # kernels of several passes must not take it
    ) -> list[Tensor]:
        return pointwise.run(program, operands, m, n, operand, compute, tile, raw)

    def pointwise_bound(
        self,
        program: Program,
        operands: Sequence[Tensor],
        m: int,
        n: int,
        operand: torch.dtype,
        compute: torch.dtype,
        tile: tuple[int, int] | None,
        raw: bool,
    ) -> Bound:
        run, flat = pointwise.bound_to(program, operands, m, n, operand, compute, tile, raw)
        return Bound(on_device(run, operands[0].device), flat)

    def prepare(self, plan: Plan, weights: Sequence[Tensor]) -> Tensor:
        return pointwise.prepare(plan, weights)

    def prepare_bound(self, plan: Plan, weights: Sequence[Tensor]) -> Bound:
        run, flat = pointwise.prepare_bound(plan, weights)
        return Bound(on_device(run, weights[0].device), flat)

    def gemm_accumulate_(self, target: Tensor, a: Tensor, b: Tensor) -> None:
        from codetta.backends.cuda.accumulate import accumulate_

        sizes = (*a.shape, *b.shape)
        fused = a.dtype in DTYPES and min(sizes) > 0 and max(sizes) <= LARGEST
        with _on(a.device):
            if not (fused and accumulate_(target, a, b)):
                REFERENCE.gemm_accumulate_(target, a, b)

    def gemm_short_sum_(
        self,
        high: Tensor,
        low: Tensor,
        a: Tensor,
        b: Tensor,
        bits: int,
        first: bool,
        last: bool,
    ) -> None:
        from codetta.backends.cuda.short_sum import short_sum_

        with _on(a.device):
            if not (_is_carried(a, b, ()) and short_sum_(high, low, a, b, bits, first, last)):
                REFERENCE.gemm_short_sum_(high, low, a, b, bits, first, last)

    # ---- binding
    def setting(self) -> Key:
        return self, self._forgotten, fp8_fast(), in_force()

    def can_bind(self) -> bool:
        return not capturing()


CUDA = CudaBackend()


def _is_carried(a: Tensor, b: Tensor, operands: Sequence[Tensor]) -> bool:
    """Whether the mainloop takes such tensors, whatever the program is."""
    wide = compute_dtype(a.dtype, operands) is torch.float64
    sizes = (*a.shape, *b.shape)
    return a.dtype in DTYPES and not wide and min(sizes) > 0 and max(sizes) <= LARGEST


@lru_cache(maxsize=256)
def _key(count: int) -> Callable[..., Key]:
    """(text, tile, fp8_fast, a, b, operands) -> what tells calls apart; flat, so quick to hash."""
    tensors = ("a", "b", *(f"t[{i}]" for i in range(count)))
    each = (f"{x}.shape, {x}.stride(), {x}.dtype, {x}.data_ptr() % 16" for x in tensors)
    made: Callable[..., Key] = eval(
        f"lambda text, tile, fast, a, b, t: (text, tile, fast, a.device, {', '.join(each)})"
    )
    return made


def _finish(program: Program, a: Tensor, b: Tensor) -> Finish | None:
    finals = finalizer(program)
    if finals is None:
        return None
    return pointwise.bound(finals.program, a, b.shape[1])


class _on:
    """Make a device current where it is not; without CUDA (compile only) do nothing."""

    __slots__ = ("guard",)

    def __init__(self, device: torch.device) -> None:
        other = device.type == "cuda" and device.index != torch.cuda.current_device()
        self.guard = torch.cuda.device(device) if other else None

    def __enter__(self) -> None:
        if self.guard is not None:
            self.guard.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.guard is not None:
            self.guard.__exit__(*error)


@lru_cache(maxsize=8)
def _warn_reference(dtype: str) -> None:
    warnings.warn(
        f"{dtype} GEMMs run on the reference backend on this device: the fused kernels are for "
        "bfloat16 and float16. Cast a and b, or run under torch.autocast.",
        stacklevel=4,
    )
