"""Running programs on canonical arrays: no autograd, no checks, little overhead.

For code that schedules programs itself (plans, backward passes, compiled graphs). Authors call
:func:`codetta.gemm`, which checks its arguments and differentiates.

Canonical arrays are two-dimensional: a (M, K), b (K, N); tiles (M, w N), rows (1, w N), columns and
indices (M, 1), scalars (1, 1); a rotary operand is two tensors, its table (P, rotary_dim) and its
positions (M,). Results come back as a flat list in program order: stores (M, w N), reduced columns
(M,), rows (w N,), scalars (); with ``raw`` the partials in place of the finals, see
:mod:`codetta.backends.layout`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from codetta.backends.layout import Result, compute_dtype, results
from codetta.backends.select import backend_for
from codetta.backends.watched import is_watched
from codetta.language.program import Program
from codetta.language.trace import epilogue
from codetta.language.values import Value
from codetta.ops.library import GEMM, GEMM_ACCUMULATE_, GEMM_SHORT_SUM_, POINTWISE

__all__ = [
    "IDENTITY",
    "Result",
    "compute_dtype",
    "results",
    "run_gemm",
    "run_gemm_accumulate_",
    "run_gemm_short_sum_",
    "run_pointwise",
]


@epilogue
def identity(acc: Value) -> Value:
    """a @ b and nothing else."""
    return acc


#: The program of a plain GEMM.
IDENTITY: Program = identity


def run_gemm(
    program: Program,
    a: Tensor,
    b: Tensor,
    operands: Sequence[Tensor] = (),
    *,
    tile: tuple[int, int] | None = None,
    raw: bool = False,
) -> list[Tensor]:
    """Run a program on the tiles of a @ b; the operator ``codetta::gemm``, below autograd.

    a is (M, K), b (K, N), ``operands`` in the program's order. The accumulator is fp64 if a or an
    operand is, else fp32. Nothing is checked and no gradient is recorded.
    """
    if torch.compiler.is_dynamo_compiling():
        return GEMM(program.line, a, b, list(operands), tile or (), raw)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        if is_watched(a, b):
            return GEMM(program.line, a, b, list(operands), tile or (), raw)
        return backend_for(a).gemm(program, a, b, operands, tile, raw)


def run_pointwise(
    program: Program,
    operands: Sequence[Tensor],
    m: int,
    n: int,
    operand_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    *,
    tile: tuple[int, int] | None = None,
    raw: bool = False,
) -> list[Tensor]:
    """Run a program without accumulator (a backward pass, a finalizer, a fold).

    It is the operator ``codetta::pointwise``, below autograd. m and n are the M and N that widths
    refer to, ``operand_dtype`` what 'operand' and ``compute_dtype`` what 'accumulator' stands for.
    """
    types = (operand_dtype, compute_dtype)
    arguments = (program.line, list(operands), m, n, *types, tile or (), raw)
    if torch.compiler.is_dynamo_compiling():
        return POINTWISE(*arguments)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return POINTWISE(*arguments)


def run_gemm_accumulate_(target: Tensor, a: Tensor, b: Tensor) -> None:
    """target += a @ b in place; the operator ``codetta::gemm_accumulate_``, below autograd."""
    if torch.compiler.is_dynamo_compiling():
        GEMM_ACCUMULATE_(target, a, b)
        return
    # This one writes: the layer that is skipped for the others counts the target's versions.
    with torch._C._AutoDispatchBelowAutograd():
        GEMM_ACCUMULATE_(target, a, b)


def run_gemm_short_sum_(
    high: Tensor, low: Tensor, a: Tensor, b: Tensor, bits: int, *, first: bool, last: bool
) -> None:
    """Add a @ b to a sum in 24 or 20 bits: ``codetta::gemm_short_sum_``, below autograd.

    See :meth:`codetta.backends.select.Backend.gemm_short_sum_`.
    """
    with torch._C._AutoDispatchBelowAutograd():
        GEMM_SHORT_SUM_(high, low, a, b, bits, first, last)
