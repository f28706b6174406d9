"""Two ways to launch a kernel, with the same arguments and results.

``OPERATORS`` calls the library operators (``codetta::gemm``, ``codetta::pointwise``,
``codetta::prepare``): whatever watches PyTorch's dispatcher, a trace, a fake tensor, a compiler,
sees every kernel. That costs a walk through the dispatcher and a schema check per kernel, so where
nobody is watching a backend is called directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from codetta.backends.watched import PLAIN, somebody_watches
from codetta.language.program import Program
from codetta.ops import run_gemm_accumulate_, run_gemm_short_sum_
from codetta.ops.library import GEMM, POINTWISE
from codetta.plan.plan import Plan
from codetta.plan.prepare import PREPARE


def is_watched(values: Iterable[Any]) -> bool:
    """Whether kernels on these tensors, and pairs of tensors, must go through the dispatcher."""
    return (
        torch.compiler.is_dynamo_compiling()
        or somebody_watches()
        or not all(map(_is_plain, values))
    )


def _is_plain(x: Any) -> bool:
    if type(x) in PLAIN:
        return True
    return all(map(_is_plain, x)) if type(x) is tuple else not isinstance(x, Tensor)


class Operators:
    """The library operators, as a backend; see :class:`codetta.backends.select.Backend`.

    An operator returns fresh tensors: ``into`` is not used.
    """

    name = "operators"
    binds = False

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
        return _called(GEMM, program.line, a, b, list(operands), tile or (), raw)

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
        into: Mapping[int, Tensor] | None = None,
    ) -> list[Tensor]:
        types = (operand, compute)
        return _called(POINTWISE, program.line, list(operands), m, n, *types, tile or (), raw)

    def prepare(self, plan: Plan, weights: Sequence[Tensor]) -> Tensor:
        return _called(PREPARE, plan.line, list(weights))

    def gemm_accumulate_(self, target: Tensor, a: Tensor, b: Tensor) -> None:
        run_gemm_accumulate_(target, a, b)

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
        run_gemm_short_sum_(high, low, a, b, bits, first=first, last=last)


OPERATORS = Operators()


def _called(operator: Any, *arguments: Any) -> Any:
    """Below autograd, which has nothing to record here."""
    if torch.compiler.is_dynamo_compiling():
        return operator(*arguments)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return operator(*arguments)
