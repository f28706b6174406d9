"""From a region to the function that takes its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from codetta.capture.call import Given, Made, RegionCall
from codetta.capture.forms import same
from codetta.capture.join import IS_ROTATED, Joined, join
from codetta.capture.regions import Region, Regions, depends, region_builder
from codetta.capture.scores import scores_only
from codetta.errors import CodettaError
from codetta.language.types import Kind
from codetta.language.values import Value
from codetta.nn.block import BACKWARD, HALVES, compiled
from codetta.plan.plan import Input, Plan, PlanBuilder

_KINDS = {Kind.TILE: "tile", Kind.COL: "col"}


class LeftAlone(Exception):
    """Why a region stays as it is."""


@dataclass
class Assembly:
    """One region on its way.

    Attributes:
        region_of: the region of each lifted value.
        arguments: nodes the call takes; ``results`` those it replaces.
    """

    regions: Regions
    region: Region
    region_of: dict[int, Region]
    index: int
    arguments: list[fx.Node] = field(default_factory=list)
    results: list[fx.Node] = field(default_factory=list)

    def call(self) -> RegionCall:
        """The function. Raises LeftAlone with the reason why there is none."""
        if not any(self.regions.nodes[i].op == "mm" for i in self.inside):
            raise LeftAlone("it contains no contraction with a weight")
        builder, done = region_builder(
            self.regions.nodes, self.region, self.regions.lens.leaves, f"region_{self.index}",
            {i: f"in_{node.name}" for i, node in self.crossing.items()},
        )  # fmt: skip
        made, mask = self._outputs(builder, done)
        if not made:
            raise LeftAlone("nothing outside reads it")
        naive = builder.build()
        given = [self._given(x) for x in naive.inputs if x.name != IS_ROTATED]
        self._check_dtypes(given, made)
        own = {n for n, f in self.regions.reading.lifted.items() if f.value.id in self.inside}
        if own & set(self.arguments):
            raise LeftAlone("it reads its own results")
        call = RegionCall(naive, given, made, self._like(given), mask, self._modules())
        _check(call)
        return call

    # ---- what it reads
    @cached_property
    def inside(self) -> set[int]:
        """Values that its outputs need."""
        needed = (depends(self.regions.nodes, i) for i in self.region.outputs)
        return set().union(*needed) & self.region.values

    @cached_property
    def crossing(self) -> dict[int, fx.Node]:
        """Values of other regions that it reads, with a node of each."""
        found: dict[int, fx.Node] = {}
        for i in sorted(self.inside):
            for a in self.regions.nodes[i].args:
                if a not in self.region.values and a in self.region_of:
                    found[a] = self._node_of(a)
        return found

    def _node_of(self, value: int) -> fx.Node:
        for node, form in self.regions.reading.lifted.items():
            if form.value.id == value and form.ordered and len(form.features) <= 1:
                return node
        raise LeftAlone("it reads an intermediate result of another region")

    def _given(self, x: Input) -> Given:
        lens = self.regions.lens
        for node in self.crossing.values():
            if x.name == f"in_{node.name}":
                return Given(x.name, _KINDS[x.type.kind], (self._argument(node),))
        leaf = lens.leaves[x.name]
        nodes = leaf.tensors or (leaf.node,)
        return Given(x.name, leaf.kind, tuple(self._argument(n) for n in nodes))

    def _argument(self, node: fx.Node) -> int:
        if node not in self.arguments:
            self.arguments.append(node)
        return self.arguments.index(node)

    def _value(self, g: Given) -> Any:
        return self.regions.lens.seen.values[self.arguments[g.arguments[0]]]

    def _like(self, given: list[Given]) -> tuple[int, tuple[int, ...]]:
        """The argument with the most token axes, and which they are."""
        found: tuple[int, tuple[int, ...]] | None = None
        for g in given:
            if g.kind != "tile":
                continue
            shape = self._value(g).shape
            axes = tuple(i for i in range(len(shape) - 1) if not same(shape[i], 1))
            if found is None or len(axes) > len(found[1]):
                found = g.arguments[0], axes
        if found is None:
            raise LeftAlone("it reads no activation")
        return found

    def _check_dtypes(self, given: list[Given], made: list[Made]) -> None:
        found = {self._value(g).dtype for g in given if g.kind in ("tile", "weight")}
        if len(found) > 1:
            raise LeftAlone(f"its matrices are of several dtypes: {_named(found)}")
        (operand,) = found
        for m in made:
            if m.form.value.type.kind is Kind.TILE and m.dtype.itemsize > operand.itemsize:
                raise LeftAlone(f"a result is kept in {m.dtype}, its matrices are {operand}")

    # ---- what it gives
    def _outputs(
        self, builder: PlanBuilder, done: dict[int, Value]
    ) -> tuple[list[Made], tuple[int, int] | None]:
        nodes = {i: self._readers(i) for i in self.region.outputs}
        scores = {done[i].id for i, found in nodes.items() if scores_only(found)}
        joined = join(builder, [done[i] for i in self.region.outputs], scores)
        made: list[Made] = []
        covered: set[int] = set()
        for count, j in enumerate(joined):
            builder.output(f"joined_{count}", j.value, scores_only=j.scores_only)
            for i in self.region.outputs:
                if done[i].id in j.columns:
                    covered.add(i)
                    made += self._made(nodes[i], f"joined_{count}", j.columns[done[i].id])
        for count, i in enumerate(i for i in self.region.outputs if i not in covered):
            turned = done[i].node.op == "rotate" and done[i].id in scores
            builder.output(f"out_{count}", done[i], scores_only=turned)
            made += self._made(nodes[i], f"out_{count}", None)
        return made, _mask(joined)

    def _readers(self, value: int) -> list[fx.Node]:
        """Nodes of this value that something outside reads."""
        return [
            node
            for node, form in self.regions.reading.lifted.items()
            if form.value.id == value and any(map(self._outside, node.users))
        ]

    def _outside(self, user: fx.Node) -> bool:
        if user in self.regions.alive:
            return True
        form = self.regions.reading.lifted.get(user)
        other = self.region_of.get(form.value.id) if form is not None else None
        return other is not None and other is not self.region

    def _made(
        self, nodes: list[fx.Node], output: str, columns: tuple[int, int] | None
    ) -> list[Made]:
        self.results += nodes
        values = self.regions.lens.seen.values
        lifted = self.regions.reading.lifted
        return [Made(output, columns, lifted[n], values[n].dtype) for n in nodes]

    def _modules(self) -> tuple[str, ...]:
        """Paths of the modules whose weights it multiplies with, in order."""
        found = []
        for i in sorted(self.inside):
            if self.regions.nodes[i].op == "mm":
                stack = self.regions.reading.owner[i].meta.get("nn_module_stack") or {}
                found.append(_path(stack))
        return tuple(dict.fromkeys(p for p in found if p))


def _mask(joined: list[Joined]) -> tuple[int, int] | None:
    masks = {j.mask for j in joined if j.mask is not None}
    if len(masks) > 1:
        raise LeftAlone("it has several groups of normalized heads")
    return masks.pop() if masks else None


def _path(stack: dict[str, Any]) -> str:
    """Dotted path of the innermost module of a node."""
    if not stack:
        return ""
    text = str(list(stack.values())[-1][0])
    for noise in ("L['self'].", "L['args'][0].", "L['fn'].", "L['self']", "_modules"):
        text = text.replace(noise, "")
    for a, b in (("['", "."), ("']", ""), ("[", "."), ("]", ""), ("..", ".")):
        text = text.replace(a, b)
    return text.strip(".")


def _named(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))


def _check(call: RegionCall) -> None:
    """Its Plan has schedules, forward and backward."""
    try:
        plan: Plan = call.plan(HALVES)
        names = tuple(i.name for i in plan.inputs if i.type.kind is not Kind.ROTARY)
        compiled(plan, names, tuple(o.name for o in plan.outputs), BACKWARD)
    except CodettaError as error:
        raise LeftAlone(str(error).splitlines()[0]) from error
