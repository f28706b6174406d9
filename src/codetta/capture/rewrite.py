"""A PyTorch graph with its regions in the place of what they compute.

    observe.py   what each node does, in aten operators
    lens.py      those operators as one Plan (rules.py and the families beside it)
    regions.py   the Plan cut at what the language cannot say
    join.py      q, k and v side by side
    assemble.py  one region as a function (call.py)
    splice.py    that function in the graph

The algebra (R1 to R9) and the derivative of a region are those of any Plan. What is not proved
equal is left alone, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from codetta.capture.assemble import Assembly, LeftAlone
from codetta.capture.call import RegionCall
from codetta.capture.lens import Lens
from codetta.capture.observe import Observed, observe
from codetta.capture.regions import Regions, read
from codetta.capture.splice import sort, splice


@dataclass(frozen=True, slots=True)
class Left:
    """A node, or a region named after its first result, that was left alone."""

    node: str
    what: str
    reason: str


@dataclass
class Rewritten:
    """What was done to a graph: the regions' calls in order, and what was left alone."""

    calls: list[RegionCall] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)


def rewrite(module: fx.GraphModule, inputs: Sequence[Any], parameters: set[int]) -> Rewritten:
    """Replace regions of ``module`` in place.

    Args:
        inputs: values of its placeholders.
        parameters: which of them are parameters or buffers.
    """
    graph = module.graph
    seen = observe(module, list(inputs))
    lens = Lens(seen, _fixed(graph, parameters))
    reading = read(lens, graph, _untouchable(graph, seen))
    regions = Regions(reading, graph)
    found = regions.find()
    region_of = {i: r for r in found for i in r.values}
    report = Rewritten()
    replaced: dict[fx.Node, fx.Node] = {}
    for region in found:
        assembly = Assembly(regions, region, region_of, len(report.calls))
        try:
            call = assembly.call()
        except LeftAlone as reason:
            node = reading.owner[min(region.outputs)]
            report.left.append(Left(node.name, "region", str(reason)))
            continue
        splice(graph, call, assembly.arguments, assembly.results, replaced)
        report.calls.append(call)
    report.left += [
        Left(n.name, _what(n), why) for n, why in lens.reasons.items() if n in regions.alive
    ]
    if replaced:
        sort(graph)
        graph.eliminate_dead_code()
        graph.lint()
        module.recompile()
    return report


def _what(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def _fixed(graph: fx.Graph, parameters: set[int]) -> set[fx.Node]:
    """Nodes that depend on parameters and buffers alone."""
    found: set[fx.Node] = set()
    for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder"):
        if i in parameters:
            found.add(node)
    for node in graph.nodes:
        computed = node.op in ("call_function", "call_method") and node.all_input_nodes
        if node.op == "get_attr" or (computed and all(a in found for a in node.all_input_nodes)):
            found.add(node)
    return found


def _untouchable(graph: fx.Graph, seen: Observed) -> set[fx.Node]:
    """Nodes where gradients are switched off or on, and all that touch a tensor written into."""
    skip: set[fx.Node] = set()
    enabled = torch.is_grad_enabled()
    written: set[int] = set()
    for node in graph.nodes:
        if seen.grad.get(node, enabled) != enabled:
            skip.add(node)
        for call in seen.calls.get(node) or ():
            if call.op._schema.is_mutable:
                written |= {id(x) for x in call.args if isinstance(x, Tensor)}
    for node in graph.nodes:
        for call in seen.calls.get(node) or ():
            if any(id(x) in written for x in (*call.args, call.result)):
                skip.add(node)
    return skip
