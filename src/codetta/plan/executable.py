"""A Schedule as a flat list of bound steps: what to call, which slots to read, write and clear.

Everything that a Schedule alone decides is decided here once: a value is a number of slots in one
list of tensors (slots.py), and a step (steps.py) knows its slots, its program, which side is
transposed, and which slots nobody reads any more. Running is then a loop over steps. The sizes and
dtypes of a run are read from its inputs. For inputs of a class that came before, a backend that
binds has the loop written out (bound.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from codetta.backends.select import Backend, Binding, backend_for
from codetta.backends.watched import PLAIN
from codetta.language.meaning import NAMED_DTYPES
from codetta.language.types import Kind
from codetta.plan.bound import Bindings, Writer
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
#: Shapes of inputs and of outputs, as kernels and callers read them, where they are not as given.
_INPUT: dict[Kind, tuple[int, ...]] = {**CANONICAL, Kind.ROTARY: (-1,)}  # its positions
_OUTPUT: dict[Kind, tuple[int, ...] | None] = {Kind.TILE: None, Kind.SCALAR: ()}


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
        inputs = _by_name(schedule, self.names)
        #: Slots of the inputs, a Rotary one having two.
        self.inputs = tuple(slot for i, _ in inputs for slot in slots.at[i])
        #: Inputs that kernels read in other dimensions.
        self.canonical = tuple(
            (slots.at[i][-1], _INPUT[n.type.kind]) for i, n in inputs if n.type.kind in _INPUT
        )
        kinds = [(slots.at[o.node][0], plan.nodes[o.node].type.kind) for o in plan.outputs]
        self.results = tuple((slot, _OUTPUT.get(kind, (-1,))) for slot, kind in kinds)
        self.narrow = NAMED_DTYPES.get(plan.narrow)
        at = {slot: k for k, slot in enumerate(self.inputs)}
        types = [(at[slots.at[i][-1]], n.type) for i, n in inputs]
        self.sample = next(k for k, t in types if t.kind is Kind.TILE)
        self.tokens = next((k for k, t in types if t.has_rows and t.rows == "M"), None)
        # Autograd, which the direct way switches off, may be at work inside an opaque function.
        self.plain = all(k.kind != OPAQUE_KIND for k in schedule.kernels)
        #: Whether it may write to an input is found out in each run.
        self.donates = any(given for s in self.steps for *_, given in s.into)
        packs = [s.packs for s in self.steps if s.packs is not None]
        #: None: what may lie side by side is not known from the inputs.
        self.bindings = None
        if all(slot in at for _, members in packs for slot in members):
            packed = [(sides, [at[slot] for slot in members]) for sides, members in packs]
            self.bindings = Bindings(len(self.inputs), packed)

    def run(self, values: list[Any], *, donate: bool = False) -> list[Tensor]:
        """Outputs, in order: tiles (rows, cols), vectors (length,), scalars ().

        Args:
            values: inputs in order, tiles two-dimensional, a Rotary input as (table, positions).
                The list is emptied, so that a tensor which only it refers to is freed as soon as
                its last reader has run.
            donate: private inputs (see Schedule) that nothing else refers to may be written to.
        """
        flat = [y for x in values for y in (x if type(x) is tuple else (x,))]
        values.clear()
        return self.run_flat(flat, donate=donate)

    def run_flat(self, values: list[Any], *, donate: bool = False) -> list[Tensor]:
        """The same with a Rotary input as two values."""
        tensors = PLAIN.issuperset(map(type, values))  # no numbers, no tensors of other classes
        direct = self.plain and not is_watched(() if tensors else values)
        backend: Backend = backend_for(values[self.sample]) if direct else OPERATORS
        binding = cast(Binding, backend) if tensors and backend.binds else None
        if binding is None or self.bindings is None or (donate and self.donates):
            return self._execute(values, self._run(values, backend, donate and direct))
        key = self.bindings.key(values, binding)
        function = self.bindings.find(key)
        if function is None:
            return self._first(values, binding, key)
        # Below autograd and its view tracking, which would forbid changing an output in place.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return function(values)

    def _run(self, values: list[Any], backend: Backend, donate: bool) -> Run:
        sample = values[self.sample]
        m = 1 if self.tokens is None else values[self.tokens].shape[0]
        return Run(backend, m, self.narrow or sample.dtype, sample.device, donate)

    def _first(self, values: list[Any], backend: Binding, key: Hashable) -> list[Tensor]:
        """A run of a class that is not bound yet."""
        assert self.bindings is not None
        run = self._run(values, backend, False)
        if not (self.bindings.is_due(key) and backend.can_bind()):
            return self._execute(values, run)
        to = Writer(list(zip(self.inputs, values, strict=True)), self.canonical)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            slots = self._slots(values, run)
            for each in self.steps:
                each.run(slots, run)
                each.bind(slots, run, backend, to)
                for slot in each.dead:
                    slots[slot] = None
                to.drop(each.dead)
        self.bindings.keep(key, to.made(self.results))
        return self._results(slots)

    def _execute(self, values: list[Any], run: Run) -> list[Tensor]:
        if run.backend is OPERATORS:
            if torch.compiler.is_dynamo_compiling():  # it drops such labels, with a warning
                return self._steps(self._slots(values, run), run)
            with torch.profiler.record_function(SCHEDULE):
                return self._steps(self._slots(values, run), run)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self._steps(self._slots(values, run), run)

    def _slots(self, values: list[Any], run: Run) -> list[Any]:
        """The inputs in their slots; ``values`` is emptied."""
        slots: list[Any] = [None] * self.size
        for slot, x in zip(self.inputs, values, strict=True):
            slots[slot] = x
        values.clear()
        for slot, shape in self.canonical:
            x = slots[slot]
            if not isinstance(x, Tensor):
                x = torch.full((), x, dtype=run.compute, device=run.device)
            slots[slot] = x.reshape(shape)
        return slots

    def _steps(self, values: list[Any], run: Run) -> list[Tensor]:
        for each in self.steps:
            each.run(values, run)
            for slot in each.dead:
                values[slot] = None
        return self._results(values)

    def _results(self, values: list[Any]) -> list[Tensor]:
        return [
            values[s] if shape is None else values[s].reshape(shape) for s, shape in self.results
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
