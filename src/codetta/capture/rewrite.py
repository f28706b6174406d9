"""A PyTorch graph with its regions in the place of what they compute.

    observe.py   what each node does, in aten operators
    head.py      heads whose logits only a loss reads (logits.py), as one call (headcall.py)
    lens.py      those operators as one Plan (rules.py and the families beside it)
    regions.py   the Plan cut at what the language cannot say
    join.py      q, k and v side by side
    assemble.py  one region as a function (call.py)
    splice.py    that function in the graph

The algebra (R1 to R9) and the derivative of a region are those of any Plan. What is not proved
equal is left alone, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from codetta.capture.assemble import Assembly, LeftAlone
from codetta.capture.attention import causal_masks
from codetta.capture.call import RegionCall
from codetta.capture.grouped import shared_heads
from codetta.capture.headcall import HeadCall, fuse_heads
from codetta.capture.lens import Lens
from codetta.capture.observe import Call, Observed, observe, tensors_in
from codetta.capture.packed import Packed
from codetta.capture.regions import Regions, read
from codetta.capture.splice import sections, sort, splice

_RANDOM = torch.Tag.nondeterministic_seeded


@dataclass(frozen=True, slots=True)
class Left:
    """A node, or a region named after its first result, that was left alone."""

    node: str
    what: str
    reason: str


@dataclass
class Rewritten:
    """What was done to a graph: the regions' calls in order, and what was left alone.

    Attributes:
        region: for nodes that were read into a region, its call's name, or the node that stands for
            it in ``left``.
        attention: notes on attention's mask: where it became ``is_causal``, where not, and why.
        heads: calls that are a head and its loss.
        dropped: which of the graph's results, logits, it no longer returns.
        packs: weights that it reads side by side: packed, or why not; with ``pack=True``.
    """

    calls: list[RegionCall] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    region: dict[str, str] = field(default_factory=dict)
    attention: list[str] = field(default_factory=list)
    heads: list[HeadCall] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    packs: list[Packed] = field(default_factory=list)


def rewrite(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    parameters: set[int],
    masks: Mapping[int, str | None] | None = None,
    keep_logits: bool = True,
) -> Rewritten:
    """Replace regions of ``module`` in place.

    Args:
        inputs: values of its placeholders.
        parameters: which of them are parameters or buffers.
        masks: which of them are attention masks that a calling graph made, and why they are not
            known to be causal (None: they are).
        keep_logits: False: logits of which the graph computes a loss are not returned.
    """
    graph = module.graph
    seen = observe(module, list(inputs))
    lens = Lens(seen, _fixed(graph, parameters))
    skip = untouchable(graph, seen)
    fused = fuse_heads(graph, seen, skip, keep_logits)
    placeholders = [n.name for n in graph.nodes if n.op == "placeholder"]
    given = {placeholders[i]: reason for i, reason in (masks or {}).items()}
    notes = causal_masks(graph, seen, skip, given)
    notes += shared_heads(graph, seen, skip)
    ordered = _ordered(graph, seen, skip)
    together = sections(graph, _switched(graph, seen))
    reading = read(lens, graph, skip, skip - _touching_written(graph, seen))
    regions = Regions(reading, graph, ordered)
    found = regions.find()
    region_of = {i: r for r in found for i in r.values}
    report = Rewritten([], [], dict(fused.members), notes, fused.calls, fused.dropped)
    replaced: dict[fx.Node, fx.Node] = {}
    for region in found:
        assembly = Assembly(regions, region, region_of, len(report.calls))
        try:
            call = assembly.call()
        except LeftAlone as reason:
            node = reading.owner[min(region.outputs)]
            report.left.append(Left(node.name, "region", str(reason)))
            report.region |= dict.fromkeys(assembly.members, node.name)
            continue
        report.region |= dict.fromkeys(assembly.members, call.naive.name)
        splice(graph, call, assembly.arguments, assembly.results, replaced)
        report.calls.append(call)
    reasons = lens.reasons | {n: r for n in graph.nodes if (r := fused.reasons.get(n.name))}
    shown = (n for n in reasons if n in regions.alive or n.name in fused.reasons)
    report.left += [Left(n.name, _what(n), reasons[n]) for n in shown]
    if replaced or notes or fused.calls:
        sort(graph, ordered, together)
        graph.eliminate_dead_code(lambda node: node.is_impure() or node in ordered)
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


def untouchable(graph: fx.Graph, seen: Observed) -> set[fx.Node]:
    """Nodes where gradients are switched off or on, and all that touch memory written into."""
    return _switched(graph, seen) | _touching_written(graph, seen)


def _switched(graph: fx.Graph, seen: Observed) -> set[fx.Node]:
    enabled = torch.is_grad_enabled()
    return {n for n in graph.nodes if seen.grad.get(n, enabled) != enabled}


def _touching_written(graph: fx.Graph, seen: Observed) -> set[fx.Node]:
    skip: set[fx.Node] = set()
    written: set[int] = set()
    for node in graph.nodes:
        for call in seen.calls.get(node) or ():
            written |= {_memory(x) for x in _written(call)}
    written &= {_memory(x) for x in tensors_in(list(seen.values.values()))}
    for node in graph.nodes:
        touched = [seen.values.get(node), *(seen.values.get(a) for a in node.all_input_nodes)]
        for call in seen.calls.get(node) or ():
            touched += [*call.args, *call.kwargs.values(), call.result]
        if written and any(_memory(x) in written for x in tensors_in(touched)):
            skip.add(node)
    return skip


def _written(call: Call) -> list[Tensor]:
    """The arguments that a call writes into."""
    names = [a.name for a in call.op._schema.arguments]
    named = call.kwargs | dict(zip(names, call.args, strict=False))
    marked = [a.name for a in call.op._schema.arguments if a.alias_info and a.alias_info.is_write]
    return tensors_in([named.get(name) for name in marked])


def _memory(x: Tensor) -> int:
    """What a tensor shares with its views."""
    return int(x.untyped_storage()._cdata)


def _ordered(graph: fx.Graph, seen: Observed, skip: set[fx.Node]) -> set[fx.Node]:
    """Nodes that keep their order: they write, read what is written, draw random numbers, switch
    gradients or autocast on or off, or lie between such switches."""
    found: set[fx.Node] = set(skip)
    depth = 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        depth += (name == "_enter_autocast") - (name == "_exit_autocast")
        drawn = any(_RANDOM in call.op.tags for call in seen.calls.get(node) or ())
        computes = node.op in ("call_function", "call_method", "call_module")
        unseen = computes and seen.calls.get(node) is None
        if depth or drawn or unseen or name == "_exit_autocast":
            found.add(node)
    return found
