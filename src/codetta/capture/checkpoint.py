"""Activation checkpointing: the function that is run again is a graph of its own.

Dynamo turns ``torch.utils.checkpoint.checkpoint`` (use_reentrant=False) into one higher-order
operator whose first argument is the checkpointed function's graph. That graph is rewritten like any
other; the operator around it stays, and with it what AOTAutograd and Inductor know about it: the
region's operators carry the same tags as all else in it, and are run again in the backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.utils.checkpoint import checkpoint

from codetta.capture.attention import erase, may_be_mask, why_kept
from codetta.capture.observe import observe
from codetta.capture.rewrite import Left, Rewritten, rewrite, untouchable

_NAME = "tag_activation_checkpoint"
#: Of a graph module: the policy of selective checkpointing, as Dynamo hands it over.
_POLICY = "_checkpoint_context_fn"


def rewrite_bodies(
    module: fx.GraphModule, inputs: list[Any], parameters: set[int]
) -> list[Rewritten]:
    """Rewrite the graphs of checkpointed functions in place.

    Args:
        module: the graph that calls them.
        inputs: values of its placeholders.
        parameters: which of them are parameters or buffers.
    """
    bodies = checkpointed_in(module)
    if not bodies:
        return []
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    fixed = {placeholders[i] for i in parameters}
    seen = observe(module, inputs)
    skip = untouchable(module.graph, seen)
    calls = Counter(id(body) for _, body in bodies)
    found: list[Rewritten] = []
    for node, body in bodies:
        if calls[id(body)] > 1:  # it would be rewritten for one call's sizes
            found.append(Rewritten(left=[Left(node.name, _NAME, "a body that is called twice")]))
            continue
        arguments = node.args[1:]
        given = [seen.values[a] if isinstance(a, fx.Node) else a for a in arguments]
        own = {i for i, a in enumerate(arguments) if a in fixed}
        masks = {
            i: why_kept(a, seen, skip)
            for i, (a, x) in enumerate(zip(arguments, given, strict=True))
            if isinstance(a, fx.Node) and may_be_mask(x)
        }
        found += rewrite_bodies(body, given, own)
        report = rewrite(body, given, own, masks)
        report.left = [Left(f"{node.name}.{x.node}", x.what, x.reason) for x in report.left]
        found.append(report)
        _drop(node, body, [i for i, reason in masks.items() if reason is None])
    module.recompile()
    return found


def _drop(node: fx.Node, body: fx.GraphModule, masks: list[int]) -> None:
    """Do not hand over masks that the body no longer reads."""
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    unused = [i for i in masks if not placeholders[i].users]
    dropped = [node.args[1 + i] for i in unused]
    node.args = tuple(a for i, a in enumerate(node.args) if i - 1 not in unused)
    for i in unused:
        body.graph.erase_node(placeholders[i])
    body.recompile()
    for mask in dropped:
        assert isinstance(mask, fx.Node)
        if not mask.users:
            erase(node.graph, mask)


def run_checkpointed(module: fx.GraphModule) -> None:
    """Make a graph run its checkpointed functions through ``checkpoint`` itself.

    The operator stands for tracing: run as it is, it does not restore the random state.
    """
    changed = False
    for node, body in checkpointed_in(module):
        run_checkpointed(body)
        node.target = checkpointed
        changed = True
    if changed:
        module.recompile()


def checkpointed(body: fx.GraphModule, *arguments: Any, **options: Any) -> Any:
    """Run ``body``, and again in the backward."""
    known = ("preserve_rng_state", "determinism_check", "early_stop")
    kept = {k: v for k, v in options.items() if k in known}
    if _POLICY in body.meta:
        kept["context_fn"] = body.meta[_POLICY]
    function: Callable[..., Any] = body.forward
    return checkpoint(function, *arguments, use_reentrant=False, **kept)


def checkpointed_in(module: fx.GraphModule) -> list[tuple[fx.Node, fx.GraphModule]]:
    """The checkpointed functions that a graph calls: the calling node, and the function's graph."""
    found = []
    for node in module.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") == _NAME:
            body = node.args[0]
            assert isinstance(body, fx.Node)
            graph = getattr(module, str(body.target))
            if isinstance(graph, fx.GraphModule):
                found.append((node, graph))
    return found
