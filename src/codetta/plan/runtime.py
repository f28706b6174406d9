"""Execution of Schedules through the library operators.

Every kernel is one operator call (``codetta::gemm``, ``codetta::pointwise``, ``codetta::prepare``),
so a dispatch trace shows what a GPU would launch; views cost nothing, moves are plain PyTorch ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from codetta.errors import PlanInput
from codetta.language.meaning import Context
from codetta.language.primitives import REDUCTION
from codetta.language.types import Kind, Type
from codetta.language.values import attrs_of
from codetta.ops import run_gemm, run_pointwise
from codetta.plan.evaluate import canonical, evaluate
from codetta.plan.grouping import FINALIZE, GEMM, POINTWISE, PREPARE
from codetta.plan.kernels import Kernel
from codetta.plan.operations import OPERATIONS
from codetta.plan.plan import Plan
from codetta.plan.schedule import Schedule

Stored = Tensor | tuple[Tensor, ...]


def run(schedule: Schedule, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Outputs of a schedule by name: tiles (rows, cols), vectors (length,), scalars ().

    Args:
        inputs: tensors by name; tiles two-dimensional, a Rotary input as (table, positions).

    Raises:
        PlanInput: a name is missing or unknown.
    """
    plan = schedule.plan
    names = [i.name for i in plan.inputs]
    if set(names) != set(inputs):
        raise PlanInput(plan=plan.name, given=sorted(inputs), expected=names)
    return _Execution(schedule, inputs).results()


class _Execution:
    def __init__(self, schedule: Schedule, inputs: Mapping[str, Any]) -> None:
        self.schedule, self.plan = schedule, schedule.plan
        tiles = [i for i in self.plan.inputs if i.type.kind is Kind.TILE]
        sample = inputs[next(i.name for i in tiles)]
        self.operand = sample.dtype
        self.compute = torch.promote_types(torch.float32, self.operand)
        token_tiles = [i for i in self.plan.inputs if i.type.has_rows and i.type.rows == "M"]
        m = _rows(inputs[token_tiles[0].name]) if token_tiles else 1
        self.ctx = Context(m, 1, self.operand, self.compute, sample.device)
        self.values: dict[int, Stored] = {
            i: self._input(inputs[n.attr("name")], n.type)
            for i, n in enumerate(self.plan.nodes)
            if n.op == "operand"
        }

    def _input(self, x: Any, type_: Type) -> Stored:
        if isinstance(x, tuple):
            return x[0], x[1].reshape(-1)
        if isinstance(x, Tensor):
            return canonical(x, type_, x.dtype)
        return torch.full((1, 1), x, dtype=self.compute, device=self.ctx.device)

    def results(self) -> dict[str, Tensor]:
        for position, kernel in enumerate(self.schedule.kernels):
            self.launch(kernel)
            for r in {*kernel.reads, *kernel.writes}:
                if self.schedule.last_use.get(r, position) == position:
                    self.values.pop(r, None)
        return {o.name: self._output(o.node) for o in self.plan.outputs}

    def _output(self, i: int) -> Tensor:
        value, type_ = self.values[i], self.plan.nodes[i].type
        assert isinstance(value, Tensor)
        if type_.kind is Kind.TILE:
            return value
        return value.reshape(()) if type_.kind is Kind.SCALAR else value.reshape(-1)

    def launch(self, kernel: Kernel) -> None:
        if kernel.kind == GEMM:
            self._gemm(kernel)
        elif kernel.kind in (POINTWISE, FINALIZE):
            self._pointwise(kernel)
        elif kernel.kind == PREPARE:
            assert kernel.plan is not None
            args = [self._tensor(r) for r in kernel.reads]
            self.values[kernel.root] = torch.ops.codetta.prepare(kernel.plan.text, args)
        else:
            node = self.plan.nodes[kernel.root]
            args = [self._tensor(r) for r in kernel.reads]
            self.values[kernel.root] = OPERATIONS[node.op].meaning(self.ctx, attrs_of(node), *args)

    def _tensor(self, r: int) -> Tensor:
        value = self.values[r]
        assert isinstance(value, Tensor)
        return value

    def _gemm(self, kernel: Kernel) -> None:
        a, b = (self._tensor(r) for r in kernel.reads[:2])
        layout = self.plan.nodes[kernel.root].attr("layout")
        assert kernel.program is not None
        results = run_gemm(
            kernel.program,
            a.mT if layout == "tn" else a,
            b.mT if layout == "nt" else b,
            self._operands(kernel.reads[2:]),
            raw=True,
        )
        self._keep(kernel, results)

    def _pointwise(self, kernel: Kernel) -> None:
        assert kernel.program is not None
        m, n = rows_of(kernel, self.ctx.m), kernel.cols
        results = run_pointwise(
            kernel.program,
            self._operands(kernel.reads),
            m,
            n,
            self.operand,
            self.compute,
            raw=kernel.kind == POINTWISE,
        )
        self._keep(kernel, results)

    def _operands(self, reads: tuple[int, ...]) -> list[Tensor]:
        """Operand tensors; partials and rotary tables are several tensors each."""
        found: list[Tensor] = []
        seen: set[int] = set()
        for r in reads:
            value = self.values[r]
            if isinstance(value, Tensor):
                found.append(value)
            elif r not in seen:  # a reduction's components are consecutive operands
                found += value
                seen.add(r)
        return found

    def _keep(self, kernel: Kernel, results: list[Tensor]) -> None:
        produced = iter(results)
        for w in kernel.writes:
            if w < 0:
                parts = REDUCTION[self.plan.nodes[~w].op].components
                self.values[w] = tuple(next(produced) for _ in parts)
            else:
                self.values[w] = _two_dimensional(next(produced), self.plan.nodes[w].type)


def rows_of(kernel: Kernel, m: int) -> int:
    """M of a kernel, for m tokens."""
    return m if kernel.rows == "M" else int(kernel.rows)


def _rows(x: Any) -> int:
    return len(x[1]) if isinstance(x, tuple) else int(x.shape[0])


def _two_dimensional(x: Tensor, type_: Type) -> Tensor:
    if type_.kind is Kind.COL:
        return x.reshape(-1, 1)
    return x if type_.kind is Kind.TILE else x.reshape(1, -1)


# -------------------------------------------------------------------- weight preparation op
@lru_cache(maxsize=4096)
def _parsed(text: str) -> Plan:
    return Plan.parse(text)


@torch.library.custom_op("codetta::prepare", mutates_args=())
def prepare(plan: str, weights: list[Tensor]) -> Tensor:
    """Fold or pack weights as a one-output Plan says, in fp32 or wider, rounded once.

    Matrices are stored in the dtype of the first matrix given, vectors in that of the arithmetic.
    """
    part = _parsed(plan)
    named = {i.name: w for i, w in zip(part.inputs, weights, strict=True)}
    stored, compute = _prepared_dtypes(part, weights)
    (result,) = evaluate(part, compute=compute, **named).values()
    out = part.nodes[part.outputs[0].node].type
    return _two_dimensional(result.to(stored), out).contiguous()


def _prepared_dtypes(part: Plan, weights: list[Tensor]) -> tuple[torch.dtype, torch.dtype]:
    """(stored, compute)."""
    compute = torch.float32
    for w in weights:
        compute = torch.promote_types(compute, w.dtype)
    if part.nodes[part.outputs[0].node].type.kind is not Kind.TILE:
        return compute, compute
    matrices = (
        w.dtype for w, i in zip(weights, part.inputs, strict=True) if i.type.kind is Kind.TILE
    )
    return next(matrices, compute), compute


@prepare.register_fake
def _(plan: str, weights: list[Tensor]) -> Tensor:
    part = _parsed(plan)
    out = part.nodes[part.outputs[0].node].type
    rows = int(out.rows) if out.has_rows else 1
    stored, _ = _prepared_dtypes(part, weights)
    return weights[0].new_empty(rows, int(out.cols) if out.has_cols else 1, dtype=stored)
