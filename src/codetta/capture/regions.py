"""Cutting the lens's Plan into regions: what runs between two operations the language cannot say.

Every value has a level: the number of foreign operations (attention, a loss) that lie between it
and the graph's inputs on the longest way, counting only those that read something lifted. Values of
one level can be computed together without waiting for a foreign operation in between; those of one
level that hang together make a region.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from torch import fx

from codetta.capture.forms import Form
from codetta.capture.lens import Leaf, Lens
from codetta.language.functions import round_to
from codetta.language.types import Kind
from codetta.language.values import Node, Value, attrs_of
from codetta.plan.plan import PlanBuilder


@dataclass
class Reading:
    """A graph as the lens saw it.

    Attributes:
        lifted: form of each lifted node.
        owner: for each Plan value, the node that made it.
    """

    lens: Lens
    lifted: dict[fx.Node, Form] = field(default_factory=dict)
    owner: list[fx.Node] = field(default_factory=list)


@dataclass
class Region:
    """Values of one level that hang together.

    Attributes:
        values: numbers of its values in the lens's Plan.
        outputs: those that something outside reads.
    """

    level: int
    values: set[int]
    outputs: list[int] = field(default_factory=list)

    @property
    def order(self) -> int:
        return min(self.values)


def read(
    lens: Lens, graph: fx.Graph, skip: set[fx.Node], unwritten: Collection[fx.Node] = ()
) -> Reading:
    """Go through the graph once.

    Args:
        skip: nodes to leave alone.
        unwritten: those of ``skip`` whose results are what they compute: nothing writes into them.
            Rotary tables are often made where gradients are off.
    """
    reading = Reading(lens)
    for node in graph.nodes:
        if node in skip:
            lens.note(node, node in unwritten)
        elif lens.read(node):
            form = lens.known.get(id(lens.seen.values[node]))
            if isinstance(form, Form):
                reading.lifted[node] = form
        reading.owner += [node] * (len(lens.builder.nodes) - len(reading.owner))
    for node in reading.lifted:  # a later cast may have rounded what an earlier node made
        form = lens.known[id(lens.seen.values[node])]
        reading.lifted[node] = form
    return reading


class Regions:
    """Levels, connections and uses of the lifted values.

    ``kept`` are nodes that stay even where nothing reads them: they write, or draw random numbers.
    """

    def __init__(self, reading: Reading, graph: fx.Graph, kept: Collection[fx.Node] = ()) -> None:
        self.reading, self.graph, self.kept = reading, graph, kept
        self.lens = reading.lens
        self.nodes: list[Node] = self.lens.builder.nodes
        self.fixed = self._fixed()
        self.level: dict[int, int] = {}
        self.fx_level: dict[fx.Node, int] = {}
        self.alive = self._alive()
        self._levels()

    def _fixed(self) -> list[bool]:
        """Values that depend on parameters alone; they belong to every region that reads them."""
        found: list[bool] = []
        for node in self.nodes:
            if node.op == "operand":
                leaf = self.lens.leaves.get(node.attr("name"))
                found.append(leaf is not None and leaf.fixed)
            elif node.op == "extent":
                found.append(True)
            else:
                found.append(all(found[a] for a in node.args))
        return found

    def _levels(self) -> None:
        made: dict[fx.Node, list[int]] = defaultdict(list)
        for i, node in enumerate(self.reading.owner):
            made[node].append(i)
        for node in self.graph.nodes:
            below = [0]
            for a in node.all_input_nodes:
                form = self.reading.lifted.get(a)
                if form is None:
                    below.append(self.fx_level[a])
                elif not self.fixed[form.value.id]:
                    below.append(self._of(form.value.id) + 1)
            self.fx_level[node] = max(below)
            for i in made[node]:
                self._of(i)
            if node in self.reading.lifted:
                self.fx_level[node] = self._of(self.reading.lifted[node].value.id)

    def _of(self, i: int) -> int:
        stack = [i]
        while stack:
            j = stack[-1]
            node = self.nodes[j]
            missing = [a for a in node.args if a not in self.level]
            if j in self.level:
                stack.pop()
            elif missing:
                stack += missing
            else:
                self.level[j] = max((self.level[a] for a in node.args), default=self._leaf(node))
                stack.pop()
        return self.level[i]

    def _leaf(self, node: Node) -> int:
        if node.op != "operand":
            return 0
        leaf = self.lens.leaves[node.attr("name")]
        if leaf.fixed:
            return 0
        return max(self.fx_level[n] for n in (leaf.tensors or (leaf.node,)))

    def _alive(self) -> set[fx.Node]:
        """Nodes that are not lifted and still needed once the lifted ones are regions.

        What only led to a lifted value, such as the halves of a rotation, is not.
        """
        inputs = {n for leaf in self.lens.leaves.values() for n in (leaf.tensors or (leaf.node,))}
        alive: set[fx.Node] = set()
        for node in reversed(list(self.graph.nodes)):
            if node in self.reading.lifted:
                continue
            users = [u for u in node.users if u in alive]
            kept = node in self.kept or node.is_impure()
            effect = kept or node.op in ("output", "placeholder")
            if users or effect or node in inputs:
                alive.add(node)
        return alive

    def find(self) -> list[Region]:
        """Regions in the order of the graph."""
        parent: dict[int, int] = {}

        def root(i: int) -> int:
            while parent.setdefault(i, i) != i:
                parent[i] = parent[parent[i]]
                i = parent[i]
            return i

        leaf_users: dict[tuple[int, int], int] = {}
        for i, node in enumerate(self.nodes):
            if self.fixed[i] or node.op == "operand":
                continue
            root(i)
            for a in node.args:
                if self.fixed[a]:
                    continue
                if self.nodes[a].op != "operand" and self.level[a] == self.level[i]:
                    parent[root(i)] = root(a)
                elif self.nodes[a].type.kind is Kind.TILE:  # siblings that read the same matrix
                    first = leaf_users.setdefault((a, self.level[i]), i)
                    parent[root(i)] = root(first)
        groups: dict[int, set[int]] = defaultdict(set)
        for i in parent:
            groups[root(i)].add(i)
        regions = [Region(self.level[r], members) for r, members in groups.items()]
        self._outputs({i: region for region in regions for i in region.values})
        return sorted((r for r in regions if r.outputs), key=lambda r: r.order)

    def _outputs(self, region_of: dict[int, Region]) -> None:
        needed = self._needed(region_of)
        for i in sorted(needed):
            region_of[i].outputs.append(i)

    def _needed(self, region_of: dict[int, Region]) -> set[int]:
        """Values read outside their region by what is needed itself."""
        needed: set[int] = set()
        for node, form in self.reading.lifted.items():
            if form.value.id in region_of and any(u in self.alive for u in node.users):
                needed.add(form.value.id)
        stack, done = list(needed), set()
        while stack:  # inputs of needed regions that other regions make
            i = stack.pop()
            if i in done:
                continue
            done.add(i)
            for a in self.nodes[i].args:
                if a not in region_of:
                    continue
                if region_of[a] is not region_of[i]:
                    needed.add(a)
                stack.append(a)
        return needed


def region_builder(
    nodes: list[Node],
    region: Region,
    leaves: dict[str, Leaf],
    name: str,
    crossing: dict[int, str],
    wide: Collection[int] = (),
    narrow: str = "",
) -> tuple[PlanBuilder, dict[int, Value]]:
    """The region's values in a builder of its own.

    ``crossing`` names values of other regions that it reads, which become inputs. ``wide`` are
    values kept in fp32 where products are computed in ``narrow``.
    """
    builder = PlanBuilder(name)
    done: dict[int, Value] = {}

    def build(i: int) -> Value:
        if i in done:
            return done[i]
        node = nodes[i]
        if i in crossing:
            done[i] = builder.input(crossing[i], node.type, narrow=narrow if i in wide else "")
        elif node.op == "operand":
            leaf = leaves[node.attr("name")]
            role = "parameter" if leaf.fixed else "activation"
            done[i] = builder.input(leaf.name, node.type, role, narrow if i in wide else "")
        elif not node.args:
            done[i] = builder._own(builder.append(node))
        else:
            done[i] = builder.emit(node.op, *(build(a) for a in node.args), **attrs_of(node))
            if i in wide:
                done[i] = round_to(done[i], "accumulator")
        return done[i]

    for i in region.outputs:
        for j in _postorder(nodes, i, crossing):
            build(j)
    return builder, done


def _postorder(nodes: list[Node], i: int, stop: dict[int, str]) -> Iterator[int]:
    """i and what it is made of, arguments first, without recursion."""
    seen: set[int] = set()
    stack: list[tuple[int, bool]] = [(i, False)]
    while stack:
        j, ready = stack.pop()
        if ready:
            yield j
        elif j not in seen:
            seen.add(j)
            stack.append((j, True))
            if j not in stop:
                stack.extend((a, False) for a in nodes[j].args)


def depends(nodes: list[Node], i: int) -> set[int]:
    return set(_postorder(nodes, i, {}))
