"""A region as a function of the graph's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from codetta.backends.select import backend_for
from codetta.capture.forms import Form
from codetta.capture.join import IS_ROTATED
from codetta.nn.block import ADJACENT, BACKWARD, HALVES
from codetta.nn.function import apply_plan
from codetta.plan import Plan
from codetta.plan.rules import layernorm_commutes, r6_shared_operand, r9_adjacent_pairs


@dataclass(frozen=True)
class Given:
    """One input of a region: its name in the Plan, its kind, and which arguments it is made of."""

    name: str
    kind: str
    arguments: tuple[int, ...]


@dataclass(frozen=True)
class Made:
    """One tensor the graph gets back.

    Attributes:
        output: name of the Plan's output.
        columns: which of its columns; None for all.
        form: how the tensor lies in it. Token sizes are read off argument ``like``.
        dtype: of the tensor.
    """

    output: str
    columns: tuple[int, int] | None
    form: Form
    dtype: torch.dtype


class RegionCall:
    """Runs a region's Plan on tensors of the graph; differentiable.

    Attributes:
        naive: the Plan as it was read, before any rule.
        like: an argument with all token axes, and which they are.
        mask: columns where the row is_qk is 1, and all columns.
        modules: paths of the modules whose weights it multiplies with.
    """

    def __init__(
        self,
        naive: Plan,
        given: Sequence[Given],
        made: Sequence[Made],
        like: tuple[int, tuple[int, ...]],
        mask: tuple[int, int] | None,
        modules: tuple[str, ...] = (),
    ) -> None:
        self.naive, self.given, self.made = naive, tuple(given), tuple(made)
        self.like, self.mask, self.modules = like, mask, modules
        self.__name__ = naive.name

    def __repr__(self) -> str:
        return f"<codetta region {self.naive.name}>"

    @cached_property
    def _plans(self) -> dict[str, Plan]:
        return {}

    def plan(self, pairs: str) -> Plan:
        """The Plan after the algebra, for a pair layout."""
        if pairs not in self._plans:
            plan = r6_shared_operand(self.naive, pairs=pairs)
            plan = layernorm_commutes(plan)
            self._plans[pairs] = r9_adjacent_pairs(plan) if pairs == ADJACENT else plan
        return self._plans[pairs]

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        argument, axes = self.like
        sizes = [arguments[argument].shape[a] for a in axes]
        tokens = 1
        for s in sizes:
            tokens = tokens * s
        named: dict[str, Any] = {}
        for g in self.given:
            named[g.name] = _input(g, [arguments[i] for i in g.arguments], tokens)
        x = arguments[argument]
        if self.mask is not None:
            on, columns = self.mask
            named[IS_ROTATED] = torch.cat((x.new_ones(on), x.new_zeros(columns - on)))
        plan = self.plan(ADJACENT if backend_for(x).name == "cuda" else HALVES)
        found = apply_plan(plan, {i.name: named[i.name] for i in plan.inputs}, BACKWARD)
        return tuple(_output(m, found[m.output], sizes) for m in self.made)


def _input(g: Given, tensors: list[Tensor], tokens: Any) -> Any:
    x = tensors[0]
    if g.kind == "tile":
        return x.reshape(tokens, x.shape[-1])
    if g.kind == "col":
        return x.reshape(tokens)
    if g.kind == "row":
        return x.reshape(-1)
    if g.kind == "scalar":
        return x.reshape(())
    if g.kind == "rope":
        return _rotary(x, tensors[1], tokens)
    return x


def _rotary(cos: Tensor, sin: Tensor, tokens: Any) -> tuple[Tensor, Tensor]:
    """Table [cos | sin] of the first halves, and each token's row in it."""
    half = cos.shape[-1] // 2
    rows = cos.numel() // cos.shape[-1]
    first = (x[..., :half].reshape(rows, half) for x in (cos, sin))
    table = torch.cat(tuple(first), dim=1)
    table = table.to(torch.promote_types(torch.float32, table.dtype))
    positions = torch.arange(rows, device=cos.device).expand(tokens // rows, rows)
    return table, positions.reshape(-1)


def _output(m: Made, x: Tensor, sizes: Sequence[Any]) -> Tensor:
    """A matrix as the graph's tensor: its columns, taken apart and permuted."""
    if m.columns is not None:
        x = x[:, m.columns[0] : m.columns[1]]
    form = m.form
    merged = len(form.tokens) == 1 and len(sizes) > 1
    tokens = [-1] if merged else list(sizes) if form.tokens else []
    x = x.reshape(*tokens, *form.features)
    order = [a.index + (len(tokens) if a.role == "n" else 0) for a in form.axes if a.role]
    x = x.permute(order)
    for i, axis in enumerate(form.axes):
        if not axis.role:
            x = x.unsqueeze(i)
    return x if x.dtype == m.dtype else x.to(m.dtype)
