"""A Schedule as a flat list of bound steps: what to call, which slots to read, write and clear.

Everything that a Schedule alone decides is decided here once: a value is a number of slots in one
list of tensors (slots.py), and a step (steps.py) knows its slots, its program, which side is
transposed, and which slots nobody reads any more. Running is then a loop over steps. The sizes and
dtypes of a run are read from its inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from codetta.backends.select import Backend, backend_for
from codetta.language.meaning import NAMED_DTYPES
from codetta.language.types import Kind
from codetta.plan.grouping import OPAQUE_KIND
from codetta.plan.launch import OPERATORS, is_watched
from codetta.plan.plan import Plan
from codetta.plan.slots import Slots
from codetta.plan.steps import CANONICAL, Run, step

if TYPE_CHECKING:
    from codetta.plan.schedule import Schedule

#: The record_function label of a running schedule: a trace cannot tell its plain PyTorch operations
#: from those around it.
SCHEDULE = "codetta::schedule"


class Executable:
    """The steps of a Schedule.

    Attributes:
        names: of the inputs, in the order in which :meth:`run` takes them; ``outputs`` likewise.
    """

    def __init__(self, schedule: Schedule) -> None:
        plan = schedule.plan
        self.names = tuple(i.name for i in plan.inputs)
        self.outputs = tuple(o.name for o in plan.outputs)
        slots = Slots(schedule)
        self.steps = tuple(step(slots, k) for k in schedule.kernels)
        self.size = slots.size
        self.inputs = tuple(
            (slots.at[i][0], n.type.kind) for i, n in _by_name(schedule, self.names)
        )
        self.results = tuple(
            (slots.at[o.node][0], plan.nodes[o.node].type.kind) for o in plan.outputs
        )
        kinds = [i.type for i in plan.inputs]
        self.narrow = NAMED_DTYPES.get(plan.narrow)
        self.sample = next(k for k, t in enumerate(kinds) if t.kind is Kind.TILE)
        self.tokens = next((k for k, t in enumerate(kinds) if t.has_rows and t.rows == "M"), None)
        # Autograd, which the direct way switches off, may be at work inside an opaque function.
        self.plain = all(k.kind != OPAQUE_KIND for k in schedule.kernels)

    def run(self, values: list[Any], *, donate: bool = False) -> list[Tensor]:
        """Outputs, in order: tiles (rows, cols), vectors (length,), scalars ().

        Args:
            values: inputs in order, tiles two-dimensional, a Rotary input as (table, positions).
                The list is emptied, so that a tensor which only it refers to is freed as soon as
                its last reader has run.
            donate: private inputs (see Schedule) that nothing else refers to may be written to.
        """
        sample = values[self.sample]
        m = 1
        if self.tokens is not None:
            first = values[self.tokens]
            m = len(first[1]) if type(first) is tuple else first.shape[0]
        device = sample.device
        direct = self.plain and not is_watched(values)
        backend: Backend = backend_for(sample) if direct else OPERATORS
        run = Run(backend, m, self.narrow or sample.dtype, device, donate and direct)
        del sample
        if not direct:
            if torch.compiler.is_dynamo_compiling():  # it drops such labels, with a warning
                return self._execute(self._bound(values, run), run)
            with torch.profiler.record_function(SCHEDULE):
                return self._execute(self._bound(values, run), run)
        # Below autograd and its view tracking, which would forbid changing an output in place.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self._execute(self._bound(values, run), run)

    def _bound(self, values: list[Any], run: Run) -> list[Any]:
        bound: list[Any] = [None] * self.size
        for (slot, kind), x in zip(self.inputs, values, strict=True):
            if kind is Kind.TILE:
                bound[slot] = x
            elif kind is Kind.ROTARY:
                bound[slot], bound[slot + 1] = x[0], x[1].reshape(-1)
            elif isinstance(x, Tensor):
                bound[slot] = CANONICAL[kind](x)
            else:
                bound[slot] = torch.full((1, 1), x, dtype=run.compute, device=run.device)
        values.clear()
        return bound

    def _execute(self, values: list[Any], run: Run) -> list[Tensor]:
        for each in self.steps:
            each.run(values, run)
            for slot in each.dead:
                values[slot] = None
        return [
            x if kind is Kind.TILE else x.reshape(()) if kind is Kind.SCALAR else x.reshape(-1)
            for x, kind in ((values[slot], kind) for slot, kind in self.results)
        ]


def storage_dtype(plan: Plan, i: int, sample: torch.dtype) -> torch.dtype:
    """Dtype of a stored matrix; ``sample`` is the one of the Plan's first matrix."""
    named = plan.storage(i)
    if named == "accumulator":
        return torch.promote_types(torch.float32, sample)
    return NAMED_DTYPES.get(plan.narrow if named == "operand" else named, sample)


def _by_name(schedule: Schedule, names: tuple[str, ...]) -> list[tuple[int, Any]]:
    nodes = enumerate(schedule.plan.nodes)
    found = {n.attr("name"): (i, n) for i, n in nodes if n.op == "operand"}
    return [found[name] for name in names]
