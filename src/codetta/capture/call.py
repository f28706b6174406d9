"""A region as a function of the graph's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from codetta.backends.select import backend_for
from codetta.capture.forms import Form, product
from codetta.capture.join import IS_ROTATED
from codetta.capture.sharing import fault, numbered, optimized, renamed, shared
from codetta.nn.block import ADJACENT, BACKWARD, HALVES
from codetta.nn.function import apply_plan
from codetta.plan import Plan


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
        form: how the tensor lies in it.
        dtype: of the tensor.
        tokens: sizes of its token axes: a number, (argument, axis) where to read it, or -1.
    """

    output: str
    columns: tuple[int, int] | None
    form: Form
    dtype: torch.dtype
    tokens: tuple[int | tuple[int, int], ...] = ()


class RegionCall:
    """Runs a region's Plan on tensors of the graph; differentiable.

    Attributes:
        naive: the Plan as it was read, before any rule.
        like: an argument with all token axes, and which they are.
        mask: columns where the row is_qk is 1, and all columns.
        modules: paths of the modules whose weights it multiplies with.
        recompute: activations are computed again in the backward.
    """

    recompute: bool = True

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
    def shared_names(self) -> dict[str, str]:
        """For each input, its name in the Plan that is shared with all regions like this one."""
        return numbered(self.naive)

    @cached_property
    def _shared(self) -> Plan:
        return shared(self.naive, self.shared_names)

    def shared_plan(self, pairs: str) -> Plan:
        """The Plan after the algebra, for a pair layout: one for all regions like this one."""
        return optimized(self._shared, pairs)

    def fault(self, pairs: str) -> str | None:
        """Why it cannot run in a pair layout, or None."""
        return fault(self._shared, pairs)

    def layout(self, fused: bool) -> str:
        """Adjacent pairs where the fused backend runs, if the Plan has schedules for them."""
        return ADJACENT if fused and self.fault(ADJACENT) is None else HALVES

    def plan(self, pairs: str) -> Plan:
        """The same with the graph's own names."""
        own = {theirs: mine for mine, theirs in self.shared_names.items()}
        return renamed(self.shared_plan(pairs), own, self.naive.name)

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        argument, axes = self.like
        tokens = product([arguments[argument].shape[a] for a in axes])
        named: dict[str, Any] = {}
        for g in self.given:
            named[self.shared_names[g.name]] = _input(
                g, [arguments[i] for i in g.arguments], tokens
            )
        x = arguments[argument]
        if self.mask is not None:
            on, columns = self.mask
            named[IS_ROTATED] = torch.cat((x.new_ones(on), x.new_zeros(columns - on)))
        plan = self.shared_plan(self.layout(backend_for(x).name == "cuda"))
        with no_autocast(x.device.type):
            inputs = {i.name: named[i.name] for i in plan.inputs}
            found = apply_plan(plan, inputs, BACKWARD, self.recompute)
        cut = _cut(self.made, found)
        return tuple(_output(m, cut[m.output, m.columns], arguments) for m in self.made)


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


def _cut(
    made: Sequence[Made], found: Mapping[str, Tensor]
) -> dict[tuple[str, tuple[int, int] | None], Tensor]:
    """Outputs by name and columns.

    Columns that make up all of an output come from one split, whose gradient is one concatenation;
    that of a slice alone is a matrix of zeros with a part written.
    """
    cut: dict[tuple[str, tuple[int, int] | None], Tensor] = {}
    for name, x in found.items():
        parts = sorted({m.columns for m in made if m.output == name and m.columns is not None})
        ends = [0, *(end for _, end in parts)]
        cut[name, None] = x
        if parts and ends[-1] == x.shape[1] and [p[0] for p in parts] == ends[:-1]:
            pieces = torch.split(x, [end - begin for begin, end in parts], dim=1)
            cut |= {(name, p): piece for p, piece in zip(parts, pieces, strict=True)}
        else:
            cut |= {(name, p): x[:, p[0] : p[1]] for p in parts}
    return cut


def no_autocast(device: str) -> AbstractContextManager[Any]:
    """The graph's own casts are in the Plan already."""
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _output(m: Made, x: Tensor, arguments: Sequence[Tensor]) -> Tensor:
    """A matrix, cut out already, as the graph's tensor: taken apart and permuted."""
    form = m.form
    tokens = [s if isinstance(s, int) else arguments[s[0]].shape[s[1]] for s in m.tokens]
    x = x.reshape(*tokens, *form.features)
    order = [a.index + (len(tokens) if a.role == "n" else 0) for a in form.axes if a.role]
    x = x.permute(order)
    for i, axis in enumerate(form.axes):
        if not axis.role:
            x = x.unsqueeze(i)
    return x if x.dtype == m.dtype else x.to(m.dtype)
