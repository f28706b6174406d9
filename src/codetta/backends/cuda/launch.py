"""The fused backend: one kernel per GEMM program, its finals by one small kernel after it.

A call is described once per set of shapes, strides and alignments (:class:`~.calls.Call`): the
configuration, what must be copied, which buffers to make, and the compiled kernel. Later calls look
that up and launch. Kernels are compiled once per program, dtypes, majors and configuration, for all
M, N and K. Nothing waits for the device, so calls can be captured in a CUDA graph once they have
run.

What QuACK cannot carry (``explain`` says why) is a plain GEMM into fp32 and one kernel over its
result. fp32 and fp64 operands run on the reference backend, on the same device.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from codetta.backends.calls import REFERENCE
from codetta.backends.cuda import pointwise
from codetta.backends.cuda.assembly import Call, describe
from codetta.backends.cuda.configs import candidates
from codetta.backends.cuda.finalize import finalizer
from codetta.backends.cuda.lowering import lower
from codetta.backends.cuda.rules import NotLowerable
from codetta.backends.layout import compute_dtype, results
from codetta.language.functions import store
from codetta.language.program import Program
from codetta.language.trace import epilogue
from codetta.language.values import Value

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_CALLS_KEPT = 8192


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


class CudaBackend:
    """GEMM programs on QuACK's mainloop, for 16-bit matrices on Hopper."""

    name = "cuda"

    def __init__(self) -> None:
        self._calls: dict[tuple[object, ...], Call | None] = {}

    # ---- gemm
    def gemm(
        self,
        program: Program,
        a: Tensor,
        b: Tensor,
        operands: Sequence[Tensor],
        tile: tuple[int, int] | None,
        raw: bool,
    ) -> list[Tensor]:
        key = (program, tile, a.device, _signature(a), _signature(b), *map(_signature, operands))
        call = self._calls.get(key)
        if call is None and key not in self._calls:
            call = self._describe(key, program, a, b, operands, tile)
        if call is None:
            return self._otherwise(program, a, b, operands, tile, raw)
        with _on(a.device):
            stored, partials = call.run(a, b, operands)
            if raw:
                return _raw(program, stored, partials, call.shared)
            return self._finished(program, a, b, operands, stored, partials)

    def _describe(
        self,
        key: tuple[object, ...],
        program: Program,
        a: Tensor,
        b: Tensor,
        operands: Sequence[Tensor],
        tile: tuple[int, int] | None,
    ) -> Call | None:
        call: Call | None = None
        wide = compute_dtype(a.dtype, operands) is torch.float64
        if a.dtype in DTYPES and not wide and min(*a.shape, *b.shape) > 0:
            try:
                with _on(a.device):
                    call = describe(program, a, b, operands, tile)
            except NotLowerable:
                call = None
        if len(self._calls) >= _CALLS_KEPT:  # shapes that never end: start over
            self._calls.clear()
        self._calls[key] = call
        return call

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
        (acc,) = self.gemm(accumulator, a, b, (), None, False)
        return pointwise.on_accumulator(program, acc, operands, a.dtype, tile, raw)

    def _finished(
        self,
        program: Program,
        a: Tensor,
        b: Tensor,
        operands: Sequence[Tensor],
        stored: dict[str, Tensor],
        partials: dict[int, tuple[Tensor, ...]],
    ) -> list[Tensor]:
        finals = finalizer(program)
        if finals is None:
            return [stored[o.name] for o in program.outputs]
        given = _by_name(program, operands)
        arrays: list[Tensor] = []
        for read in finals.reads:
            arrays += given[read] if isinstance(read, str) else [partials[read[0]][read[1]]]
        made = self.pointwise(
            finals.program, arrays, a.shape[0], b.shape[1], a.dtype, torch.float32, None, False
        )
        named = stored | dict(zip((o.name for o in finals.program.outputs), made, strict=True))
        return [named[o.name] for o in program.outputs]

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
    ) -> list[Tensor]:
        return pointwise.run(program, operands, m, n, operand, compute, tile, raw)

    def gemm_accumulate_(self, target: Tensor, a: Tensor, b: Tensor) -> None:
        from codetta.backends.cuda.accumulate import accumulate_

        fused = a.dtype in DTYPES and min(*a.shape, *b.shape) > 0
        with _on(a.device):
            if not (fused and accumulate_(target, a, b)):
                REFERENCE.gemm_accumulate_(target, a, b)


CUDA = CudaBackend()


def _signature(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16


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


def _by_name(program: Program, operands: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Operand tensors by name; a rotary operand is two."""
    arrays = iter(operands)
    return {
        o.name: [next(arrays) for _ in range(2 if o.kind.value == "Rotary" else 1)]
        for o in program.operands
    }


def _raw(
    program: Program,
    stored: dict[str, Tensor],
    partials: dict[int, tuple[Tensor, ...]],
    shared: bool,
) -> list[Tensor]:
    """Stores and partials in order, each in memory of its own."""
    flat: list[Tensor] = []
    for name, node in _raw_order(program):
        flat += (stored[name],) if node is None else partials[node]
    if shared:
        taken: set[int] = set()
        for i, x in enumerate(flat):
            memory = x.untyped_storage().data_ptr()
            flat[i] = x.clone() if memory in taken else x
            taken.add(memory)
    return flat


@lru_cache(maxsize=1024)
def _raw_order(program: Program) -> tuple[tuple[str, int | None], ...]:
    """Names of the raw results, with the reduction's node for a partial."""
    node_of = {name: node for node, name in program.partial_names.items()}
    found = results(program, True)
    return tuple((r.name, node_of[r.name] if r.components else None) for r in found)


@lru_cache(maxsize=8)
def _warn_reference(dtype: str) -> None:
    warnings.warn(
        f"{dtype} GEMMs run on the reference backend on this device: the fused kernels are for "
        "bfloat16 and float16. Cast a and b, or run under torch.autocast.",
        stacklevel=4,
    )
