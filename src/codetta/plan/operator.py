"""``codetta::plan``: a whole schedule as one operator, for compiled graphs.

A compiler that traces a Plan kernel by kernel would see raw partials, whose shapes depend on the
tile a backend chooses later. It sees one operator instead: the Plan's canonical text and its
tensors. The schedule is made from the text where it runs, once per process, so a compiled graph can
be stored and loaded elsewhere.

An operator's results may not share memory. Results that are views of others (rows of a merged
weight gradient, columns of q, k and v) are therefore taken outside, where the compiler sees them as
what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from codetta.language.meaning import Context
from codetta.language.types import Kind
from codetta.language.values import Node, attrs_of
from codetta.ops.inductor import register_fake
from codetta.plan.executable import Executable, storage_dtype
from codetta.plan.kernels import vector_dtype
from codetta.plan.operations import OPERATIONS
from codetta.plan.plan import Plan, PlanOutput, make_plan
from codetta.plan.schedule import Schedule, schedule

_LIBRARY = torch.library.Library("codetta", "FRAGMENT")
_LIBRARY.define("plan(str plan, Tensor[] inputs) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
_KNOWN: dict[str, Executable] = {}


def is_traced(x: Any) -> bool:
    """Whether a compiler is looking: x stands for a tensor."""
    return isinstance(x, FakeTensor | FunctionalTensor)


class Traced:
    """A schedule as one operator call and the views behind it.

    Attributes:
        text: of the Plan whose outputs are not views, in one line.
        views: for each output, which result it is made of and the view operations, innermost first.
    """

    def __init__(self, made: Schedule) -> None:
        plan = made.plan
        bases: dict[int, int] = {}
        self.views: list[tuple[int, tuple[Node, ...]]] = []
        for out in plan.outputs:
            at, chain = out.node, []
            while _is_view(plan, at):
                chain.append(plan.nodes[at])
                at = plan.nodes[at].args[0]
            index = bases.setdefault(at, len(bases))
            self.views.append((index, tuple(reversed(chain))))
        outputs = [PlanOutput(f"r{k}", at) for at, k in bases.items()]
        named = {o.node: o.name for o in plan.outputs}
        outputs = [PlanOutput(named.get(o.node, o.name), o.node) for o in outputs]
        self.plan = make_plan(plan.name, plan.inputs, plan.nodes, outputs)
        self.text = self.plan.line
        order = [i.name for i in plan.inputs]
        self.reads = tuple(order.index(i.name) for i in self.plan.inputs)

    def run(self, values: list[Any]) -> list[Tensor]:
        """Results of the schedule for inputs in the Plan's order."""
        flat: list[Tensor] = []
        for k in self.reads:
            x = values[k]
            flat += x if type(x) is tuple else (x,)
        made = torch.ops.codetta.plan(self.text, flat)
        return [self._viewed(made[k], chain) for k, chain in self.views]

    @staticmethod
    def _viewed(x: Tensor, chain: tuple[Node, ...]) -> Tensor:
        ctx = Context(1, 1, x.dtype, torch.promote_types(torch.float32, x.dtype), x.device)
        vector = x.ndim == 1
        for node in chain:
            if vector:
                x = x.reshape(-1, 1) if node.op in _COLUMNS else x.reshape(1, -1)
            x = OPERATIONS[node.op].meaning(ctx, attrs_of(node), x)
            if node.type.kind is not Kind.TILE:
                x, vector = x.reshape(-1), True
        return x


_COLUMNS = frozenset({"to_row", "slice_vector"})


def _is_view(plan: Plan, i: int) -> bool:
    node = plan.nodes[i]
    return node.op in OPERATIONS and OPERATIONS[node.op].view


# --------------------------------------------------------------------------------- operator
def _executable(text: str) -> Executable:
    found = _KNOWN.get(text)
    if found is None:
        found = _KNOWN[text] = schedule(Plan.parse(text)).executable
    return found


def _grouped(plan: Plan, inputs: Sequence[Tensor]) -> list[Any]:
    tensors = iter(inputs)
    return [
        (next(tensors), next(tensors)) if i.type.kind is Kind.ROTARY else next(tensors)
        for i in plan.inputs
    ]


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Plan:
    return Plan.parse(text)


def run_plan(plan: str, inputs: list[Tensor]) -> list[Tensor]:
    """Results of a Plan, given as text, for its inputs in order: what ``codetta::plan`` computes.

    Where somebody watches, each kernel is an operator of its own. A dispatch mode that is handed
    ``codetta::plan`` sees its kernels when it calls this inside itself.
    """
    return _executable(plan).run_flat(list(inputs))


_LIBRARY.impl("plan", run_plan, "CompositeExplicitAutograd")


@register_fake("plan", _LIBRARY)
def _fake(plan: str, inputs: list[Tensor]) -> list[Tensor]:
    part = _parsed(plan)
    given = _grouped(part, inputs)
    tiles = [x for x, i in zip(given, part.inputs, strict=True) if i.type.kind is Kind.TILE]
    rows = [
        x for x, i in zip(given, part.inputs, strict=True) if i.type.has_rows and i.type.rows == "M"
    ]
    m = (len(rows[0][1]) if type(rows[0]) is tuple else rows[0].shape[0]) if rows else 1
    like = tiles[0]
    wide = torch.promote_types(torch.float32, like.dtype)
    made: list[Tensor] = []
    for out in part.outputs:
        type_ = part.nodes[out.node].type
        tall = (m if type_.rows == "M" else int(type_.rows),) if type_.has_rows else ()
        shape = (*tall, int(type_.cols)) if type_.has_cols else tall
        dtype = storage_dtype(part, out.node, like.dtype)
        if type_.kind is not Kind.TILE and vector_dtype(part, out.node) == "accumulator":
            dtype = wide
        made.append(like.new_empty(shape, dtype=dtype))
    return made
