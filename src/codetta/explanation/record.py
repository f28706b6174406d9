"""`codetta.explain`: catch a model's graphs on their way through the rewriter, and count.

torch.compile traces the call; a recording backend measures each graph, rewrites a copy, measures
that, and lets the call run the graph that came. Nothing of it stays: the model is not compiled
afterwards, and its parameters and gradients are as before.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from codetta.capture.assemble import module_path
from codetta.capture.backend import Compiler
from codetta.capture.call import RegionCall
from codetta.capture.headcall import HeadCall
from codetta.capture.packed import Packed
from codetta.capture.packed import notes as packing_notes
from codetta.capture.rewrite import Rewritten
from codetta.explanation.eager import Measured, is_attention, measure
from codetta.explanation.facts import BACKWARD, Explanation, KernelFact, LeftFact, RegionFact
from codetta.explanation.fused import Sizes, kernels_of, key_of, sizes_of
from codetta.explanation.head import NOTE, head_kernels, head_sizes

_CALLS = (RegionCall, HeadCall)
_ATTENTION = "attention: PyTorch's own kernel, between two regions"
_ALONE = "no contraction with a weight could take it over"


def explain(model: nn.Module | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What CODA makes of one call of ``model``: every kernel before and after, and what is left.

    The call ``model(*args, **kwargs)`` is traced by torch.compile, rewritten, counted and run once
    as it is, without a backward; on the meta device it costs no memory and no arithmetic. Give
    labels (or anything that makes the result a scalar loss) to see the backward that training
    runs; otherwise the backward is counted from the outputs. Under ``torch.no_grad()`` only the
    forward is.

    A model that ``codetta.compile`` returned is explained as it was compiled, with its ``logits``,
    ``pack``, ``recompute`` and ``loss_memory_limit``.

    Bytes: each kernel reads its tensors once and writes its results once. Kernels of PyTorch are
    counted one operation at a time, as eager execution runs them; what is left to torch.compile
    becomes less. Time: the roofline of a GPU, :meth:`Explanation.on` another.

    Returns an :class:`Explanation`: ``print`` it, ``.to_html(path)``, ``.to_dict()``.
    """
    compiler = getattr(model, "codetta_compiler", None)
    chosen = {
        name: getattr(compiler, name)
        for name in ("logits", "packer", "recompute", "loss_memory_limit")
        if compiler is not None
    }
    caught = _Catcher(**chosen)
    model = _original(model)
    compiled = torch.compile(model, backend=caught, dynamic=False)
    try:
        compiled(*args, **kwargs)
    finally:
        target = model.forward if isinstance(model, nn.Module) else model
        code = getattr(getattr(target, "__func__", target), "__code__", None)
        if code is not None:
            torch._dynamo.eval_frame.remove_from_cache(target)
    name = type(model).__name__ if isinstance(model, nn.Module) else model.__name__
    return _assembled(name, caught.graphs, caught.packer is not None)


def _original(model: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile was given."""
    found = getattr(model, "_orig_mod", None) or getattr(model, "_torchdynamo_orig_callable", None)
    return model if found is None else found


@dataclass
class _Graph:
    """One graph before and after."""

    nodes: list[fx.Node]
    before: Measured
    rewritten: Rewritten
    after: fx.GraphModule
    measured: Measured


@dataclass(eq=False)
class _Catcher(Compiler):
    """A backend that measures, and changes nothing."""

    graphs: list[_Graph] = field(default_factory=list)

    def __call__(self, module: fx.GraphModule, inputs: list[Any], **ignored: Any) -> Any:
        before = measure(module, inputs)
        copy = _copied(module)
        super().__call__(copy, inputs, **ignored)
        self.graphs.append(
            _Graph(list(module.graph.nodes), before, self.rewritten[-1], copy,
                   measure(copy, inputs))
        )  # fmt: skip
        return module.forward

    def packs(self, module: fx.GraphModule, inputs: list[Any]) -> list[Packed]:
        """What would be packed on a GPU; nothing is."""
        found = self.packer.find(module, inputs, fused=True) if self.packer is not None else []
        return [packed for packed, _ in found]

    def finish(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        forward: Callable[..., Any] = module.forward
        return forward


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """Another graph over the same parameters; names of nodes are kept."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
        assert known[node].name == node.name
    return fx.GraphModule(module, graph)


# -------------------------------------------------------------------------------- assembling
def _assembled(name: str, graphs: list[_Graph], pack: bool) -> Explanation:
    regions: dict[str, RegionFact] = {}
    left: dict[str, LeftFact] = {}
    first: Sizes | None = None
    training = False
    notes: list[str] = []
    packs: list[Packed] = []
    for graph in graphs:
        made = _Assembler(graph)
        for region, sizes in made.regions(regions):
            first = first or sizes
            known = regions.get(region.key)
            regions[region.key] = replace(known, count=known.count + 1) if known else region
        for region in made.heads():
            known = regions.get(region.key)
            regions[region.key] = replace(known, count=known.count + 1) if known else region
        for fact in made.left():
            had = left.get(fact.key)
            left[fact.key] = replace(had, count=had.count + 1) if had else fact
        notes += [n for n in made.notes() if n not in notes]
        packs += graph.rewritten.packs
        training |= any(k.phase == BACKWARD for ks in graph.before.kernels.values() for k in ks)
    labelled = tuple(replace(r, label=label(r)) for r in regions.values())
    return Explanation(
        model=name,
        tokens=first.tokens if first else 0,
        dtype=str(first.dtype).removeprefix("torch.") if first else "",
        regions=labelled,
        left=tuple(left.values()),
        training=training,
        graphs=len(graphs),
        notes=(*notes, *(packing_notes(packs) if pack else ())),
    )


class _Assembler:
    """Which kernels of a graph went where."""

    def __init__(self, graph: _Graph) -> None:
        self.graph = graph
        self.kept = {n.name: n for n in graph.after.graph.nodes}
        self.home = self._homes()
        nodes = graph.after.graph.nodes
        self.calls = {id(n.target): n for n in nodes if isinstance(n.target, _CALLS)}

    def _homes(self) -> dict[str, str]:
        """The region that took over each node that is gone: its own, or that of what reads it."""
        owner = self.graph.rewritten.region
        rewritten = self.graph.rewritten
        names = {c.__name__ for c in rewritten.calls} | {c.__name__ for c in rewritten.heads}
        home: dict[str, str] = {}
        for node in reversed(self.graph.nodes):
            if node.name in self.kept:
                continue
            found = owner.get(node.name)
            if found not in names:
                users = [home[u.name] for u in node.users if u.name in home]
                found = users[0] if users else None
            if found is not None:
                home[node.name] = found
        return home

    def regions(self, known: dict[str, RegionFact]) -> list[tuple[RegionFact, Sizes]]:
        found = []
        for call in self.graph.rewritten.calls:
            node = self.calls.get(id(call))
            if node is None:
                continue
            measured = self.graph.measured
            sizes = sizes_of(call, measured.arguments[node.name], measured.values[node.name])
            packs = self.graph.rewritten.packs
            lying = (p.sides for p in packs if p.call == call.__name__ and not p.reason)
            sizes = replace(sizes, packed=tuple(s for s in lying if s is not None))
            key = key_of(call, sizes)
            had = known.get(key)
            after = had.after if had else kernels_of(call, sizes)
            found.append((self._fact(call, key, after), sizes))
        return found

    def heads(self) -> list[RegionFact]:
        """Heads with their losses."""
        found = []
        for call in self.graph.rewritten.heads:
            node = self.calls.get(id(call))
            if node is not None:
                measured = self.graph.measured
                training = measured.values[node.name].requires_grad
                sizes = head_sizes(call, measured.arguments[node.name], training)
                fact = self._fact(call, sizes.key, head_kernels(sizes))
                found.append(replace(fact, note=NOTE))
        return found

    def _fact(
        self, call: RegionCall | HeadCall, key: str, after: tuple[KernelFact, ...]
    ) -> RegionFact:
        members = [n for n in self.graph.nodes if self.home.get(n.name) == call.__name__]
        before = [k for n in members for k in self.graph.before.kernels.get(n.name, ())]
        return RegionFact(
            key=key,
            label="",
            count=1,
            modules=call.modules,
            first=_layer(call.modules),
            operations=tuple(Counter(_what(n) for n in members).most_common()),
            before=_in_order(before),
            after=after,
        )

    def notes(self) -> list[str]:
        """What was done to attention's masks, and what could not be counted."""
        found = list(self.graph.rewritten.attention)
        rewritten = self.graph.rewritten
        inside = sum(id(c) not in self.calls for c in (*rewritten.calls, *rewritten.heads))
        if inside:
            found.append(
                f"{inside} regions run inside activation checkpointing, which is not counted."
            )
        return found

    def left(self) -> list[LeftFact]:
        """Nodes that stay, as they were and as they are; and nodes that are gone without a region
        (what only led to a mask that is no longer made)."""
        reasons = {x.node: x.reason for x in self.graph.rewritten.left}
        was = {n.name: n for n in self.graph.nodes}
        found = []
        for name, node in {**was, **self.kept}.items():
            if node.op in ("placeholder", "output", "get_attr") or name in self.home:
                continue
            if isinstance(node.target, _CALLS) or _what(node) == "taken":
                continue
            after = self.graph.measured.kernels.get(name, ()) if name in self.kept else ()
            before = self.graph.before.kernels.get(name, ()) if name in was else ()
            group = self.graph.rewritten.region.get(name, "")
            reason = _short(reasons.get(name) or reasons.get(group) or _ALONE)
            if name not in self.kept:
                reason = "no longer needed"
            if is_attention(node):
                reason = _ATTENTION
            if not after and not before and name not in reasons:
                continue
            where = re.sub(r"\.\d+(?=\.|$)", ".*", _path(node))
            found.append(
                LeftFact(_what(node), reason, where, 1, _in_order(list(after)),
                         _in_order(list(before)))
            )  # fmt: skip
        return found


def _in_order(kernels: list[KernelFact]) -> tuple[KernelFact, ...]:
    """Forward in order; then backward in order, that is, against the graph's."""
    forward = [k for k in kernels if k.phase != BACKWARD]
    return tuple(forward + [k for k in reversed(kernels) if k.phase == BACKWARD])


def _short(reason: str) -> str:
    """'the language has no cos' for 'aten.cos.default has no counterpart in the language'."""
    return re.sub(
        r"^aten\.(\w+)\.\w+ has no counterpart in the language$", r"the language has no \1", reason
    )


def _what(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _path(node: fx.Node) -> str:
    return module_path(node.meta.get("nn_module_stack") or {})


# ------------------------------------------------------------------------------------ labels
def _layer(modules: tuple[str, ...]) -> int | None:
    numbers = [int(p) for m in modules for p in m.split(".") if p.isdigit()]
    return min(numbers) if numbers else None


def label(region: RegionFact) -> str:
    """'layers 0 to 14: o_proj, gate_proj, up_proj, down_proj; next: q_proj, k_proj, v_proj'."""
    parts: dict[int | None, list[str]] = {}
    for path in region.modules:
        name = path.split(".")[-1]
        parts.setdefault(_layer((path,)), []).append(name)
    named = "; then ".join(", ".join(names) for names in parts.values())
    if region.note:
        return f"{named or 'a head'} {region.note}"
    if region.first is None:
        return named or "no module"
    last = region.first + region.count - 1
    where = f"layers {region.first} to {last}" if region.count > 1 else f"layer {region.first}"
    others = [n for n in parts if n is not None and n != region.first]
    if others:
        where += " and the next" if region.count > 1 else f" and {others[0]}"
    return f"{where}: {named}"
