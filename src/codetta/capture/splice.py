"""Putting a region's call into a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

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


def sort(graph: fx.Graph, ordered: Collection[fx.Node] = ()) -> bool:
    """Delay what reads a region until after it; all else keeps its order. False if nothing moved.

    ``ordered``: nodes that keep their order among themselves, whatever they read.

    Raises:
        RuntimeError: there is a cycle.
    """
    done: set[fx.Node] = set()
    waiting, order = list(graph.nodes), []
    while waiting:
        rest: list[fx.Node] = []
        held = False
        for node in waiting:
            fixed = node in ordered
            ready = all(a in done for a in node.all_input_nodes)
            held |= fixed and not ready
            if ready and not (fixed and held):
                done.add(node)
                order.append(node)
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
