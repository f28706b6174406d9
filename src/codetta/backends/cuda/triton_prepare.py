"""Weight preparation with one read and one write: pack rows of several weights and fold vectors in.

The Plans that prepare weights stack, interleave and permute rows and multiply by a norm's γ. Moving
rows needs no kernel of its own: the source of every result row, (which weight, which of its rows),
is a table made once per Plan and device, and the generated kernel loads through it
(``Task.gathered``). What remains of the Plan is an elementwise Program over the gathered matrices
and vectors. Plans of another form, such as sums over rows of a weight, are evaluated operation by
operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from codetta.backends.cuda.capture import refuse
from codetta.backends.cuda.triton_kernels import Kernel, kernel, on_device
from codetta.backends.cuda.triton_launch import DTYPES
from codetta.backends.cuda.triton_stages import cut
from codetta.backends.cuda.triton_task import Sink, Task
from codetta.kept import kept
from codetta.language.primitives import PRIMITIVES, Family
from codetta.language.program import Operand, Output, Program
from codetta.language.trace import ProgramTracer
from codetta.language.types import Kind
from codetta.language.values import Value, attrs_of
from codetta.plan.operations import OPERATIONS
from codetta.plan.plan import Plan
from codetta.plan.prepare import prepared, prepared_dtypes

#: Operations that only say where each row comes from.
_MOVES = frozenset(
    {"stack_rows", "slice_rows", "interleave_rows", "every_other_row", "permute_rows"}
)
#: Maps that look at one column at a time.
_ELEMENTWISE = frozenset(
    p.name for p in PRIMITIVES.values() if p.family is Family.MAP
) - {"unpack", "pack", "rotate"}  # fmt: skip


def prepare_weights(plan: Plan, weights: Sequence[Tensor]) -> Tensor:
    """The one output of ``plan``, a matrix or vector of parameters, as a two-dimensional array.

    Computed in fp32 or wider and rounded once. A matrix is stored in the dtype of the first matrix
    among the weights, a vector in that of the arithmetic.

    Raises:
        ColdCapture: a kernel must be compiled and a stream is being captured.
    """
    return _found(plan, weights)(plan, weights)


def fixed(plan: Plan, weights: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Tensor] | None:
    """What :func:`prepare_weights` has launched, see :meth:`Kernel.fixed`."""
    found = _found(plan, weights)
    return found.fixed(weights) if isinstance(found, _Bound) else None


def _found(plan: Plan, weights: Sequence[Tensor]) -> Callable[[Plan, Sequence[Tensor]], Tensor]:
    key = (plan.text, weights[0].device, *[w.dtype for w in weights])
    found = _BOUND.get(key)
    if found is None:
        refuse(plan.name)  # tables are copied to the device
        packing = _packing(plan.text)
        found = _evaluated if packing is None else _Bound(plan, packing, weights)
        _BOUND[key] = found
    return found


def _evaluated(plan: Plan, weights: Sequence[Tensor]) -> Tensor:
    return prepared(plan, weights)


class _Bound:
    """A packing with its kernel and tables, for weights of certain dtypes on one device."""

    def __init__(self, plan: Plan, packing: _Packing, weights: Sequence[Tensor]) -> None:
        stored, compute = prepared_dtypes(plan, weights)
        self.kernel = _kernel(plan.text, DTYPES[stored], DTYPES[compute], packing.cols.bit_length())
        self.rows, self.cols = packing.rows, packing.cols
        texts, shapes = [], {}
        for matrices, vector in packing.reads:
            texts += [f"w[{i}]" for i in (matrices if vector is None else (vector,))]
            if vector is not None:
                column = packing.kinds[vector] is Kind.COL
                shapes[f"w[{vector}]"] = (-1, 1) if column else (1, -1)
        scope: dict[str, Any] = {}
        for k, (place, rows) in enumerate(packing.maps):
            scope[f"table{k}"] = _table(plan.text, k, rows, weights[0].device)
            texts.insert(place, f"table{k}")
        #: Of each tensor of the kernel: which weight it is, or which table.
        self.order, self.scope = texts, scope
        given = (f"{x}.reshape({shapes[x]})" if x in shapes else x for x in texts)
        self.tensors = eval(f"lambda w: [{', '.join(given)}]", scope)

    def __call__(self, plan: Plan, weights: Sequence[Tensor]) -> Tensor:
        with on_device(weights[0]):
            return self.kernel.run(self.tensors(weights), self.rows, self.cols, plan.name)[0]

    def fixed(self, weights: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Tensor] | None:
        made = self.kernel.fixed(self.tensors(weights), self.rows, self.cols)
        scope = self.scope | {"run": made}
        return eval(f"lambda w: run([{', '.join(self.order)}])[0]", scope) if made else None


_BOUND: dict[tuple[Any, ...], Callable[[Plan, Sequence[Tensor]], Tensor]] = {}


@dataclass(frozen=True, eq=False)
class _Packing:
    """A Plan as an elementwise program over gathered matrices.

    Attributes:
        program: of width-1 tiles and vectors.
        gathered: its gathered operands, (name, number of matrices).
        reads: of each operand, (positions of its matrices among the weights, None) or
            ((), position of the vector).
        maps: (place in the flat list of tensors, (rows, 2): which matrix, which of its rows).
        kinds: kind of each weight.
        rows, cols: of the result.
    """

    program: Program
    gathered: tuple[tuple[str, int], ...]
    reads: tuple[tuple[tuple[int, ...], int | None], ...]
    maps: tuple[tuple[int, Tensor], ...]
    kinds: tuple[Kind, ...]
    rows: int
    cols: int


@lru_cache(maxsize=1024)
def _packing(text: str) -> _Packing | None:
    """The packing that a Plan is, None if it is something else."""
    plan = Plan.parse(text)
    if len(plan.outputs) != 1 or plan.nodes[plan.outputs[0].node].type.kind is not Kind.TILE:
        return None
    reader = _Reader(plan)
    made = reader.value(plan.outputs[0].node)
    return reader.packing(made) if made is not None and made.type.kind is Kind.TILE else None


class _Reader:
    """Reads a Plan as an elementwise program over gathered matrices."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.out = plan, plan.nodes[plan.outputs[0].node].type
        self.position = {i.name: k for k, i in enumerate(plan.inputs)}
        self.tracer = ProgramTracer(plan.name)
        self.operands: dict[str, Operand] = {}
        self.moved: dict[str, Tensor] = {}
        self.done: dict[int, Value | None] = {}

    def value(self, i: int) -> Value | None:
        """Node i in the program, None if it has no place there."""
        if i not in self.done:
            self.done[i] = self._value(i)
        return self.done[i]

    def _value(self, i: int) -> Value | None:
        node = self.plan.nodes[i]
        if node.op == "const":
            return self.tracer.append(node)
        if node.type.has_cols and node.type.cols != self.out.cols:
            return None
        if node.op == "operand":
            return self._operand(node.attr("name"), node.type.kind)
        if node.op in _MOVES:
            rows = _sources(self.plan, i, self.position)
            if rows is None:
                return None
            self.moved[f"moved{i}"] = rows
            return self._operand(f"moved{i}", Kind.TILE)
        args = [self.value(a) for a in node.args] if node.op in _ELEMENTWISE else [None]
        known = [a for a in args if a is not None]
        if len(known) < len(args):
            return None
        if node.op == "broadcast":
            return known[0]
        return self.tracer.emit(node.op, *known, **attrs_of(node))

    def _operand(self, name: str, kind: Kind) -> Value:
        self.operands.setdefault(name, Operand(name, kind))
        return self.tracer.operand(self.operands[name])

    def packing(self, made: Value) -> _Packing:
        outputs = [Output("w", made.id, "operand")]
        declared = list(self.operands.values())
        program = Program.build(self.plan.name, declared, self.tracer.nodes, outputs)
        reads: list[tuple[tuple[int, ...], int | None]] = []
        maps: list[tuple[int, Tensor]] = []
        gathered: list[tuple[str, int]] = []
        size = 0
        for operand in program.operands:
            if operand.name in self.moved:
                rows = self.moved[operand.name]
                matrices, which = rows[:, 0].unique(return_inverse=True)
                reads.append((tuple(matrices.tolist()), None))
                gathered.append((operand.name, len(matrices)))
                size += len(matrices)
                maps.append((size, torch.stack((which, rows[:, 1]), dim=1)))
            elif operand.kind is Kind.TILE:
                reads.append(((self.position[operand.name],), None))
            else:
                reads.append(((), self.position[operand.name]))
            size += 1
        kinds = tuple(i.type.kind for i in self.plan.inputs)
        sizes = int(self.out.rows), int(self.out.cols)
        return _Packing(program, tuple(gathered), tuple(reads), tuple(maps), kinds, *sizes)


def _sources(plan: Plan, i: int, position: dict[str, int]) -> Tensor | None:
    """Where each row of node i comes from, by moving row numbers instead of rows."""
    node = plan.nodes[i]
    if node.op == "operand":
        # Kept on the host, whatever the default device is: Inductor sets one around its graphs.
        rows = torch.arange(int(node.type.rows), device="cpu")
        return torch.stack((torch.full_like(rows, position[node.attr("name")]), rows), dim=1)
    if node.op not in _MOVES:
        return None
    parts = [_sources(plan, a, position) for a in node.args]
    if any(p is None for p in parts):
        return None
    meaning: Any = OPERATIONS[node.op].meaning
    moved: Tensor = meaning(None, attrs_of(node), *parts)
    return moved


@lru_cache(maxsize=256)
def _kernel(text: str, stored: str, compute: str, bits: int) -> Kernel:
    packing = _packing(text)
    assert packing is not None
    program = packing.program
    sinks = (Sink("store", program.outputs[0].node, stored),)
    task = Task(program, sinks, stored, compute, False, packing.gathered)
    return kernel(task, cut(task, packing.cols, None))


def _table(text: str, k: int, rows: Tensor, device: torch.device) -> Tensor:
    """Map k as the kernel reads it: which matrix for all rows, then which row, in one column."""
    return kept(
        device,
        ("table", text, k),
        lambda: rows.to(torch.int32).T.reshape(-1, 1).to(device),
    )
