"""The reference backend behind the library operators: flat lists in, flat lists out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from codetta.backends import short_sums
from codetta.backends.layout import compute_dtype, results
from codetta.backends.reference import Partial, execute, matmul
from codetta.errors import PositionOutOfRange
from codetta.language.meaning import Context
from codetta.language.program import Program
from codetta.language.types import Kind

if TYPE_CHECKING:
    from codetta.plan.plan import Plan


class ReferenceBackend:
    """Plain PyTorch on any device; see :mod:`codetta.backends.reference`."""

    name = "reference"
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
        compute = compute_dtype(a.dtype, operands)
        ctx = Context(a.shape[0], b.shape[1], a.dtype, compute, a.device)
        named = _named(program, operands)  # gathers first: a bad position must not cost a GEMM
        acc = matmul(a, b, compute) if program.has_acc else None
        outputs, partials = execute(program, ctx, named, acc=acc, tile=tile)
        return _flat(program, operands, outputs, partials, raw)

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
        ctx = Context(m, n, operand, compute, operands[0].device)
        outputs, partials = execute(program, ctx, _named(program, operands), tile=tile)
        return _flat(program, operands, outputs, partials, raw)

    def prepare(self, plan: Plan, weights: Sequence[Tensor]) -> Tensor:
        from codetta.plan.prepare import prepared

        return prepared(plan, weights)

    def gemm_accumulate_(self, target: Tensor, a: Tensor, b: Tensor) -> None:
        compute = torch.promote_types(compute_dtype(a.dtype, ()), target.dtype)
        a, b = a.to(compute), b.to(compute)
        if target.dtype is compute:
            target.addmm_(a, b)
        else:
            target.copy_(torch.addmm(target.to(compute), a, b))  # rounded once

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
        total = a.float() @ b.float()
        if not first:
            total += short_sums.joined(high, low, bits)
        if last:
            high.copy_(total)
        else:
            short_sums.split_(total, high, low, bits)


REFERENCE = ReferenceBackend()


def _named(program: Program, operands: Sequence[Tensor]) -> dict[str, Tensor]:
    """Arrays by operand name, as ``execute`` takes them: indices long, rotary tables gathered."""
    named: dict[str, Tensor] = {}
    arrays = iter(operands)
    for operand in program.operands:
        x = next(arrays)
        if operand.kind is Kind.ROTARY:
            x = _gathered(program, operand.name, x, next(arrays))
        elif operand.kind is Kind.INDEX:
            x = x.long()
        named[operand.name] = x
    return named


def _gathered(program: Program, name: str, table: Tensor, positions: Tensor) -> Tensor:
    try:
        return table.index_select(0, positions)
    except IndexError:  # CPU only: on a GPU torch asserts on the device, and nothing waits for it
        raise PositionOutOfRange(
            operand=name,
            program=program.name,
            rows=table.shape[0],
            given=f"from {int(positions.min())} to {int(positions.max())}",
        ) from None


def _flat(
    program: Program,
    operands: Sequence[Tensor],
    outputs: Mapping[str, Tensor],
    partials: Mapping[str, Partial],
    raw: bool,
) -> list[Tensor]:
    """Results in the order of :func:`results`, each in memory of its own.

    An operator must not return an alias of an input or the same memory twice, and a program may
    well ask for that: a store of an unchanged operand, two stores of one value.
    """
    # The storage objects themselves: addresses of empty ones are all alike.
    taken = {x.untyped_storage()._cdata for x in operands}
    flat: list[Tensor] = []
    for result in results(program, raw):
        parts = partials[result.name].parts if result.components else (outputs[result.name],)
        for part in parts:
            part = part.contiguous()
            memory = part.untyped_storage()._cdata
            if memory in taken:
                part = part.clone()
                memory = part.untyped_storage()._cdata
            taken.add(memory)
            flat.append(part)
    return flat
