"""Putting a region's call into a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx


def splice(
    graph: fx.Graph,
    call: Callable[..., Any],
    arguments: Sequence[fx.Node],
    results: Sequence[fx.Node],
    replaced: dict[fx.Node, fx.Node],
) -> None:
    """Call ``call`` on ``arguments``; its results take the place of ``results``.

    ``replaced`` says what took whose place before, and is extended.
    """
    arguments = [replaced.get(a, a) for a in arguments]
    position = {n: i for i, n in enumerate(graph.nodes)}
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    after = max([*arguments, placeholders[-1]], key=position.__getitem__)
    with graph.inserting_after(after):
        node = graph.call_function(call, tuple(arguments))
    at = node
    for i, old in enumerate(results):
        with graph.inserting_after(at):
            at = graph.call_function(taken, (node, i))
        at.meta.update({k: v for k, v in old.meta.items() if k in ("example_value", "val")})
        old.replace_all_uses_with(at)
        replaced[old] = at


def taken(x: Any, i: int) -> Any:
    """One of a region's results."""
    return x[i]


def sections(graph: fx.Graph, switched: Collection[fx.Node]) -> list[list[fx.Node]]:
    """Runs of nodes where gradients are not as at the graph's beginning, with their switches.

    ``switched``: these nodes. None of them is ever part of a region.
    """
    found: list[list[fx.Node]] = []
    before = False
    for node in graph.nodes:
        inside = node in switched or node.target is torch._C._set_grad_enabled
        if inside and not before:
            found.append([])
        if inside:
            found[-1].append(node)
        before = inside
    return found


def sort(
    graph: fx.Graph,
    ordered: Collection[fx.Node] = (),
    together: Sequence[Sequence[fx.Node]] = (),
) -> bool:
    """Delay what reads a region until after it; all else keeps its order. False if nothing moved.

    Args:
        ordered: nodes that keep their order among themselves, whatever they read.
        together: runs of such nodes between which nothing else may come: a region that reads a
            table made where gradients are off would have none itself.

    Raises:
        RuntimeError: there is a cycle.
    """
    done: set[fx.Node] = set()
    waiting, order = list(graph.nodes), []
    alive = set(waiting)
    runs = {run[0]: run for run in ([n for n in r if n in alive] for r in together) if run}
    later = {n for run in runs.values() for n in run[1:]}
    waiting = [n for n in waiting if n not in later]
    while waiting:
        rest: list[fx.Node] = []
        held = False
        for node in waiting:
            fixed = node in ordered
            run = runs.get(node, [node])
            own = set(run)
            ready = all(a in done or a in own for n in run for a in n.all_input_nodes)
            held |= fixed and not ready
            if ready and not (fixed and held):
                done.update(run)
                order += run
            else:
                rest.append(node)
        if len(rest) == len(waiting):
            raise RuntimeError("the rewritten graph has a cycle")
        waiting = rest
    if order == list(graph.nodes):
        return False
    previous = order[0]
    for node in order[1:]:
        previous.append(node)
        previous = node
    return True
