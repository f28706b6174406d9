"""From a region to the function that takes its place."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from codetta.capture.call import Given, Made, RegionCall
from codetta.capture.forms import product, same
from codetta.capture.join import IS_ROTATED, Joined, join
from codetta.capture.regions import Region, Regions, depends, region_builder
from codetta.capture.scores import scores_only
from codetta.language.types import Kind
from codetta.language.values import Value
from codetta.nn.block import HALVES
from codetta.plan.plan import Input, PlanBuilder

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
        self._check_dtypes(given)
        like = self._like(given)
        made = [replace(m, tokens=self._token_sizes(m)) for m in made]
        if self.members & {n.name for n in self.arguments}:
            raise LeftAlone("it reads its own results")
        call = RegionCall(naive, given, made, like, mask, self._modules())
        _check(call)
        return call

    # ---- what it reads
    @cached_property
    def inside(self) -> set[int]:
        """Values that its outputs need."""
        needed = (depends(self.regions.nodes, i) for i in self.region.outputs)
        return set().union(*needed) & self.region.values

    @cached_property
    def members(self) -> set[str]:
        """Names of the nodes whose values these are."""
        lifted = self.regions.reading.lifted
        return {n.name for n, form in lifted.items() if form.value.id in self.inside}

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

    def _seen(self, node: fx.Node) -> Any:
        return self.regions.lens.seen.values[node]

    def _value(self, g: Given) -> Any:
        return self._seen(self.arguments[g.arguments[0]])

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
        shape = self._seen(self.arguments[found[0]]).shape
        tokens = product([shape[a] for a in found[1]])
        for g in given:
            x = self._value(g)
            own = product(x.shape[:-1]) if g.kind == "tile" else x.numel()
            if g.kind in ("tile", "col") and not same(own, tokens):
                raise LeftAlone("its inputs differ in their number of tokens")
        return found

    def _token_sizes(self, m: Made) -> tuple[int | tuple[int, int], ...]:
        """Where to read the sizes of a result's token axes; one unknown size follows from M."""
        found: list[int | tuple[int, int]] = []
        for size in m.form.tokens:
            shapes = (
                (i, getattr(self._seen(n), "shape", ())) for i, n in enumerate(self.arguments)
            )
            places = ((i, a) for i, shape in shapes for a, s in enumerate(shape) if same(s, size))
            found.append(size if isinstance(size, int) else next(places, -1))
        if found.count(-1) > 1:
            raise LeftAlone("the sizes of a result are not those of an input")
        return tuple(found)

    def _check_dtypes(self, given: list[Given]) -> None:
        """Operands of one dtype; all else in that dtype, or in the one that programs compute in."""
        found = {self._value(g).dtype for g in given if g.kind in ("tile", "weight")}
        if len(found) > 1:
            raise LeftAlone(f"its matrices are of several dtypes: {_named(found)}")
        (operand,) = found
        wide = torch.promote_types(torch.float32, operand)
        lifted = self.regions.reading.lifted
        for node, form in lifted.items():
            dtype = self._seen(node).dtype
            if form.value.id in self.inside and dtype not in (operand, wide):
                raise LeftAlone(f"it computes in {dtype} between matrices of {operand}")
        for node in self.results:
            dtype = self._seen(node).dtype
            value = lifted[node].value
            exact = value.type.kind is not Kind.TILE or value.node.op in ("round_to", "operand")
            if not exact and dtype.itemsize > operand.itemsize:
                raise LeftAlone(f"a result is kept in {dtype}, its matrices are {operand}")

    # ---- what it gives
    def _outputs(
        self, builder: PlanBuilder, done: dict[int, Value]
    ) -> tuple[list[Made], tuple[int, int] | None]:
        stored: dict[int, Value] = {}
        nodes: dict[int, list[fx.Node]] = {}
        for i in self.region.outputs:
            value = _unrounded(done[i])  # a store rounds anyway
            stored[value.id] = value
            nodes.setdefault(value.id, []).extend(self._readers(i))
        scores = {i for i, found in nodes.items() if scores_only(found)}
        joined = join(builder, list(stored.values()), scores)
        made: list[Made] = []
        for count, j in enumerate(joined):
            builder.output(f"joined_{count}", j.value, scores_only=j.scores_only)
            for i, columns in j.columns.items():
                made += self._made(nodes[i], f"joined_{count}", columns)
                del stored[i]
        again = _read_rounded(builder)
        for count, (i, value) in enumerate(stored.items()):
            turned = value.node.op == "rotate" and i in scores
            builder.output(f"out_{count}", again.get(i, value), scores_only=turned)
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


def _read_rounded(b: PlanBuilder) -> dict[int, Value]:
    """Rounded forms, by what they round, that something reads: one store serves both."""
    read = {a for node in b.nodes for a in node.args}
    found = ((i, n) for i, n in enumerate(b.nodes) if n.op == "round_to" and i in read)
    return {n.args[0]: Value(b, i) for i, n in found}


def _unrounded(x: Value) -> Value:
    return Value(x.tracer, x.node.args[0]) if x.node.op == "round_to" else x


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
    if (reason := call.fault(HALVES)) is not None:
        raise LeftAlone(reason)
