"""A Plan as a differentiable PyTorch function.

``apply_plan`` runs the forward schedule, keeps what the backward schedule reads and nothing else,
and runs the backward schedule in one autograd node. Which inputs need gradients decides which
backward is built: a frozen weight has no wgrad in its Plan.

Unless the graph is kept for another backward, what the forward saved for this backward alone is let
go of as soon as its last reader has run, or becomes the memory of a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from codetta.backends.select import backend_for, chosen_backend, use_backend
from codetta.errors import DoubleBackward
from codetta.language.types import Kind
from codetta.nn.block import BACKWARD, Rules, compiled
from codetta.plan import Plan, PlanBuilder
from codetta.plan.executable import storage_dtype
from codetta.plan.launch import is_watched
from codetta.plan.operator import Traced, is_traced
from codetta.plan.plan import PARAMETER


def apply_plan(
    plan: Plan, inputs: Mapping[str, Any], rules: Rules = BACKWARD, recompute: bool = True
) -> dict[str, Tensor]:
    """Outputs of an optimized Plan by name, differentiable with respect to its tensor inputs.

    Args:
        plan: inputs and outputs as in :func:`codetta.plan.run`.
        inputs: tensors by name; a Rotary input is (table, positions), without gradient.
        rules: the algebra of forward and backward together.
        recompute: False keeps for the backward all that products of the forward read, see
            :func:`codetta.plan.split`.
    """
    names = _names(plan)
    tensors = [inputs[n] for n in names.tensors]
    constants = tuple(inputs[n] for n in names.constants)
    wanted: tuple[bool, ...] = ()
    if torch.is_grad_enabled():
        wanted = tuple(x.requires_grad for x in tensors)
    bound = _bound(plan, wanted if any(wanted) else (), rules, recompute)
    if bound.backward is None:
        found = bound.run_forward(bound.given(tensors, constants))
    else:
        found = _PlanFunction.apply(bound, constants, *tensors)
    return dict(zip(names.outputs, found, strict=True))


class _Names:
    """Names of a Plan's inputs and outputs."""

    def __init__(self, plan: Plan) -> None:
        rotary = {i.name for i in plan.inputs if i.type.kind is Kind.ROTARY}
        self.constants = tuple(i.name for i in plan.inputs if i.name in rotary)
        self.tensors = tuple(i.name for i in plan.inputs if i.name not in rotary)
        self.outputs = tuple(o.name for o in plan.outputs)


@lru_cache(maxsize=256)
def _names(plan: Plan) -> _Names:
    return _Names(plan)


@lru_cache(maxsize=256)
def _bound(plan: Plan, wanted: tuple[bool, ...], rules: Rules, recompute: bool) -> _Bound:
    return _Bound(plan, wanted, rules, recompute)


class _Bound:
    """A Plan's executables for one set of wanted gradients, and how values get from one to another.

    Values are numbered: tensors, then constants, then the forward's results, then cotangents.

    Attributes:
        outputs: how many of the forward's results are outputs; the rest is for the backward.
        saved: numbers of the values that autograd keeps.
        reads: for each input of the backward, (its place among the saved, None) or (0, its number).
        gradients: for each tensor, the backward's result that is its gradient, or None.
        weights: for each tensor, whether it is a parameter.
    """

    def __init__(self, plan: Plan, wanted: tuple[bool, ...], rules: Rules, recompute: bool) -> None:
        names = _names(plan)
        wrt = tuple(n for n, w in zip(names.tensors, wanted, strict=False) if w)
        parts = compiled(plan, wrt, names.outputs, rules, recompute)
        self.plan, self.outputs, self.parts = plan, len(names.outputs), parts
        self.forward = parts.forward.executable
        self.backward = parts.backward.executable if parts.backward is not None else None
        inputs = (*names.tensors, *names.constants)
        self._order = tuple(inputs.index(n) for n in self.forward.names)
        if self.backward is None:
            return
        cotangents = tuple(f"d_{n}" for n in names.outputs)
        numbers = {n: i for i, n in enumerate((*inputs, *self.forward.outputs, *cotangents))}
        self.first_result = len(inputs)
        self.first_cotangent = len(inputs) + len(self.forward.outputs)
        read = [numbers[n] for n in self.backward.names]
        constant = range(len(names.tensors), len(inputs))
        self.saved = tuple(i for i in read if i < self.first_cotangent and i not in constant)
        self.reads = tuple((self.saved.index(i), None) if i in self.saved else (0, i) for i in read)
        made = {n: i for i, n in enumerate(self.backward.outputs)}
        self.gradients = tuple(made.get(f"d_{n}") for n in names.tensors)
        roles = {i.name: i.role for i in plan.inputs}
        self.weights = tuple(roles[n] == PARAMETER for n in names.tensors)

    @cached_property
    def traced_forward(self) -> Traced:
        return Traced(self.parts.forward)

    @cached_property
    def traced_backward(self) -> Traced:
        assert self.parts.backward is not None
        return Traced(self.parts.backward)

    def run_forward(self, values: list[Any]) -> list[Tensor]:
        """The forward's results; one operator where a compiler traces."""
        if any(map(is_traced, values)):
            return self.traced_forward.run(values)
        return self.forward.run(values)

    def given(self, tensors: Sequence[Tensor], constants: Sequence[Any]) -> list[Any]:
        """The forward's inputs, in its order."""
        known = (*tensors, *constants)
        return [known[i] for i in self._order]


class _PlanFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bound: _Bound, constants: tuple[Any, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        found = bound.run_forward(bound.given(tensors, constants))
        known = (*tensors, *constants, *found)
        ctx.save_for_backward(*(known[i] for i in bound.saved))
        ctx.set_materialize_grads(False)
        ctx.bound, ctx.constants, ctx.backend = bound, constants, chosen_backend()
        ctx.like = [(t.shape, t.dtype) for t in tensors]
        return tuple(found[: bound.outputs])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        bound: _Bound = ctx.bound
        if all(d is None for d in cotangents):
            return (None,) * (2 + len(ctx.like))
        # Autograd may run this in a thread of its own, which knows nothing of use_backend.
        if chosen_backend() != ctx.backend:
            with use_backend(ctx.backend), torch.no_grad():
                made = _backward(ctx, bound, cotangents)
        else:
            with torch.no_grad():
                made = _backward(ctx, bound, cotangents)
        result: list[Tensor | None] = []
        for k, weight, (shape, dtype) in zip(bound.gradients, bound.weights, ctx.like, strict=True):
            g = None if k is None else made[k]
            if g is not None and weight:
                g = _apart(g)
            if g is not None and (g.dtype is not dtype or g.shape != shape):
                g = g.reshape(shape).to(dtype)
            result.append(g)
        if torch.is_grad_enabled():  # create_graph=True
            result = _once(bound.plan.name, result)
        return None, None, *result


def _backward(ctx: Any, bound: _Bound, cotangents: Sequence[Tensor | None]) -> list[Tensor]:
    assert bound.backward is not None
    arrived = _with_zeros(bound.plan, cotangents)
    tensors = len(ctx.like)
    saved = list(ctx.saved_tensors)
    values: list[Any] = []
    for place, number in bound.reads:
        if number is None:
            values.append(saved[place])
        elif number < bound.first_result:
            values.append(ctx.constants[number - tensors])
        else:
            values.append(arrived[number - bound.first_cotangent])
    del saved
    if any(map(is_traced, values)):
        return bound.traced_backward.run(values)
    # Nobody will ask for the saved tensors again: the run holds the last reference to them.
    once = not torch._C._autograd._get_current_graph_task_keep_graph()
    if once:
        ctx.maybe_clear_saved_tensors()
    return bound.backward.run(values, donate=once)


def _apart(g: Tensor) -> Tensor:
    """A weight's gradient in rows of its own, where it is every other row of a merged one.

    Autograd keeps no gradient that lies otherwise than its parameter: it would copy it, on a GPU
    by a kernel that reads half as fast as this one. A compiler makes a kernel of its own.
    """
    if g.is_contiguous() or (backend := backend_for(g)).name != "cuda":
        return g
    if is_traced(g) or is_watched((g,)):
        return g.contiguous()
    return backend.prepare(_alone(*g.shape), [g])


@lru_cache(maxsize=256)
def _alone(rows: int, cols: int) -> Plan:
    """A weight as it is."""
    b = PlanBuilder("rows_apart")
    b.output("apart", b.weight("w", rows, cols))
    return b.build()


def _with_zeros(plan: Plan, arrived: Sequence[Tensor | None]) -> list[Tensor]:
    """A cotangent for every output: an output that reached no loss has gradient zero."""
    sample = next(d for d in arrived if d is not None)
    tokens = sample.shape[0]
    full = []
    for out, d in zip(plan.outputs, arrived, strict=True):
        if d is None:
            type_ = plan.nodes[out.node].type
            shape = (tokens, int(type_.cols)) if type_.kind is Kind.TILE else (tokens,)
            d = sample.new_zeros(shape, dtype=storage_dtype(plan, out.node, sample.dtype))
        full.append(d)
    return full


def _once(name: str, gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Gradients whose own differentiation is a named error."""
    found = list(gradients)
    tensors = [g for g in found if g is not None]
    guarded = iter(_Once.apply(name, *(t.detach().requires_grad_() for t in tensors)))
    return [None if g is None else next(guarded) for g in found]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> None:
        raise DoubleBackward(program=ctx.name)
