"""From a region to the function that takes its place."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from codetta.capture.call import Given, Made, RegionCall
from codetta.capture.forms import product, same
from codetta.capture.join import IS_ROTATED, Joined, join
from codetta.capture.observe import tensors_in
from codetta.capture.regions import Region, Regions, depends, region_builder
from codetta.capture.scores import scores_only
from codetta.language.functions import round_to
from codetta.language.types import Kind
from codetta.language.values import Value
from codetta.nn.block import HALVES
from codetta.plan.plan import Input, PlanBuilder

_CAST = torch.ops.aten._to_copy.default
#: They compute nothing: what reads their result reads the same numbers.
_MOVES = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("expand", "view", "_unsafe_view", "unsqueeze", "permute", "clone", "alias")
) | {torch.ops.aten.transpose.int, torch.ops.aten.slice.Tensor}
_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
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
            {i: f"in_{node.name}" for i, node in self.crossing.items()}, self._wide(), self.narrow,
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
        if len(found) > 1 and not self.narrow:
            raise LeftAlone(f"its matrices are of several dtypes: {_named(found)}")
        operand = _NARROW[self.narrow] if self.narrow else found.pop()
        wide = torch.promote_types(torch.float32, operand)
        lifted = self.regions.reading.lifted
        for node, form in lifted.items():
            dtype = self._seen(node).dtype
            if form.value.id in self.inside and dtype not in (operand, wide):
                raise LeftAlone(f"it computes in {dtype} between matrices of {operand}")
        for node in () if self.narrow else self.results:
            dtype = self._seen(node).dtype
            value = lifted[node].value
            exact = value.type.kind is not Kind.TILE or value.node.op in ("round_to", "operand")
            if not exact and dtype.itemsize > operand.itemsize:
                raise LeftAlone(f"a result is kept in {dtype}, its matrices are {operand}")

    @cached_property
    def narrow(self) -> str:
        """The dtype of its products where other matrices are kept in fp32, as under autocast.

        "" where there is one dtype, or where a check of dtypes will say what is wrong.
        """
        multiplied = self.regions.lens.multiplied
        products = {multiplied.get(i) for i in self.inside if self.regions.nodes[i].op == "mm"}
        found = set(self._matrices().values())
        for name, dtype in _NARROW.items():
            if products == {dtype} and found <= {dtype, torch.float32} and found != {dtype}:
                return name
        return ""

    def _matrices(self) -> dict[int, torch.dtype]:
        """Dtypes of the matrices it reads, by value."""
        found = {i: self._seen(node).dtype for i, node in self.crossing.items()}
        for i in self._read():
            node = self.regions.nodes[i]
            if node.op == "operand" and i not in found:
                leaf = self.regions.lens.leaves[node.attr("name")]
                if leaf.kind in ("tile", "weight"):
                    found[i] = self._seen(leaf.node).dtype
        nodes = self.regions.nodes
        return {i: d for i, d in found.items() if nodes[i].type.kind is Kind.TILE}

    def _read(self) -> set[int]:
        return {a for i in self.inside for a in self.regions.nodes[i].args} | self.inside

    def _wide(self) -> set[int]:
        """What is kept in fp32 among products of a narrower dtype: inputs, and sums read twice."""
        if not self.narrow:
            return set()
        found = {i for i, dtype in self._matrices().items() if dtype is torch.float32}
        nodes, inside = self.regions.nodes, self.inside
        readers = Counter(a for i in inside for a in dict.fromkeys(nodes[i].args))
        for node, form in self.regions.reading.lifted.items():
            i = form.value.id
            sums = i in inside and nodes[i].op in ("add", "sub")
            tile = sums and nodes[i].type.kind is Kind.TILE
            kept = readers[i] + (i in self.region.outputs) > 1
            if tile and kept and self._seen(node).dtype is torch.float32:
                found.add(i)
        return found

    def _kept_wide(self, nodes: list[fx.Node]) -> bool:
        """Whether a result must be fp32: the graph says so, and does not narrow it at once."""
        if not self.narrow:
            return False
        return any(
            self._seen(n).dtype is torch.float32 and not self._narrowed_at_once(n) for n in nodes
        )

    def _narrowed_at_once(self, node: fx.Node) -> bool:
        """Every reader outside casts it down before it computes, as autocast's attention does."""
        seen = self.regions.lens.seen
        x = seen.values[node]
        for user in filter(self._outside, node.users):
            calls = seen.calls.get(user) or ()
            given = ((c, tensors_in([*c.args, *c.kwargs.values()])) for c in calls)
            reading = [c for c, read in given if any(t is x for t in read)]
            cast = all(
                c.op is _CAST and c.result.dtype.itemsize < x.dtype.itemsize for c in reading
            )
            moved = all(c.op in _MOVES for c in calls)
            if not reading or not (cast or (moved and self._narrowed_at_once(user))):
                return False
        return True

    # ---- what it gives
    def _outputs(
        self, builder: PlanBuilder, done: dict[int, Value]
    ) -> tuple[list[Made], tuple[int, int] | None]:
        stored: dict[int, Value] = {}
        nodes: dict[int, list[fx.Node]] = {}
        for i in self.region.outputs:
            value, read = _unrounded(done[i]), self._readers(i)  # a store rounds anyway
            stored[value.id] = value
            nodes.setdefault(value.id, []).extend(read)
        scores = {i for i, found in nodes.items() if scores_only(found)}
        joined = join(builder, list(stored.values()), scores)
        made: list[Made] = []
        for count, j in enumerate(joined):
            parts = [n for i in j.columns for n in nodes[i]]
            builder.output(f"joined_{count}", self._kept(j.value, parts), scores_only=j.scores_only)
            for i, columns in j.columns.items():
                made += self._made(nodes[i], f"joined_{count}", columns)
                del stored[i]
        again = _read_rounded(builder)
        for count, (i, value) in enumerate(stored.items()):
            turned = value.node.op == "rotate" and i in scores
            value = self._kept(again.get(i, value), nodes[i])
            builder.output(f"out_{count}", value, scores_only=turned)
            made += self._made(nodes[i], f"out_{count}", None)
        return made, _mask(joined)

    def _kept(self, value: Value, nodes: list[fx.Node]) -> Value:
        return round_to(value, "accumulator") if self._kept_wide(nodes) else value

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
                found.append(module_path(stack))
        return tuple(dict.fromkeys(p for p in found if p))


def _read_rounded(b: PlanBuilder) -> dict[int, Value]:
    """Rounded forms, by what they round, that something reads: one store serves both."""
    read = {a for node in b.nodes for a in node.args}
    found = ((i, n) for i, n in enumerate(b.nodes) if n.op == "round_to" and i in read)
    return {n.args[0]: Value(b, i) for i, n in found if n.attr("dtype") == "operand"}


def _unrounded(x: Value) -> Value:
    stored = x.node.op == "round_to" and x.node.attr("dtype") == "operand"
    return Value(x.tracer, x.node.args[0]) if stored else x


def _mask(joined: list[Joined]) -> tuple[int, int] | None:
    masks = {j.mask for j in joined if j.mask is not None}
    if len(masks) > 1:
        raise LeftAlone("it has several groups of normalized heads")
    return masks.pop() if masks else None


def module_path(stack: dict[str, Any]) -> str:
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
