"""A head and its loss as one call in the graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

import codetta
from codetta.capture.assemble import module_path
from codetta.capture.call import no_autocast
from codetta.capture.head import Head, find_heads
from codetta.capture.logits import Source
from codetta.capture.observe import Observed


class HeadCall:
    """Cross-entropy of hidden states, a weight and targets, without stored logits; differentiable.

    Attributes:
        arguments: nodes it reads: hidden states, weight, targets, and a bias if there is one.
        name: of the node whose product with the weight it takes over.
        modules: path of the module whose weight that is.
        memory_limit: bytes that it may take beside inputs and gradients; None: 1 GiB.
    """

    memory_limit: int | None = None

    def __init__(self, head: Head, dtype: torch.dtype) -> None:
        assert head.loss is not None
        self.loss, self.product, self.dtype = head.loss, head.product, dtype
        sources = [self.product.x, self.product.right, self.loss.target, self.product.bias]
        self.arguments = tuple(s.node for s in sources if s is not None)
        self.name = self.product.at.name
        self.__name__ = f"loss_of_{self.name}"
        path = module_path(self.product.at.meta.get("nn_module_stack") or {})
        self.modules = (path,) if path else ()

    def __repr__(self) -> str:
        return f"<codetta loss of {self.name}>"

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of :func:`codetta.linear_cross_entropy`."""
        logits = self.loss.logits
        scale, cap = logits.up / logits.down, None
        if logits.post is not None:
            scale, cap = logits.up * logits.post / logits.down, logits.post
        found: dict[str, Any] = {"ignore_index": self.loss.ignore_index}
        found |= {"reduction": self.loss.reduction}
        found |= {"logit_scale": scale} if scale != 1 else {}
        if self.memory_limit is not None:
            found["memory_limit"] = self.memory_limit
        return found | ({"softcap": cap} if cap is not None else {})

    def __call__(
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        x = _as(x, self.product.x)
        for move in self.loss.logits.moves:
            x = move(x)
        weight = _as(weight, self.product.right)
        weight = weight if self.product.transposed else weight.t()
        if bias is not None:
            assert self.product.bias is not None
            bias = _as(bias, self.product.bias)
        with no_autocast(x.device.type):
            loss: Tensor = codetta.linear_cross_entropy(
                x.reshape(-1, x.shape[-1]), weight, target.reshape(-1), bias=bias, **self.options
            )
        loss = loss.to(self.dtype)
        return loss.reshape(target.shape) if self.loss.like_target else loss


def _as(x: Tensor, source: Source) -> Tensor:
    x = x.to(source.dtype)
    for move in source.moves:
        x = move(x)
    return x


@dataclass
class Fused:
    """What became of a graph's heads.

    Attributes:
        calls: those that became calls.
        members: for nodes that are gone, the name of the call that took their place.
        reasons: why others stay as they are, by the node of the loss or of the product.
        dropped: which of the graph's results, logits, are gone.
    """

    calls: list[HeadCall] = field(default_factory=list)
    members: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)


def fuse_heads(
    graph: fx.Graph, seen: Observed, skip: set[fx.Node], keep_logits: bool = True
) -> Fused:
    """Put calls in the place of heads and losses.

    Args:
        graph: any graph; it is changed.
        seen: what its nodes do; extended.
        skip: nodes to leave alone.
        keep_logits: logits that the graph returns stay, and the loss reads them. False: they are
            returned no more.
    """
    found = Fused()
    gone: list[fx.Node] = []
    for head in find_heads(graph, seen, skip):
        assert head.at is not None or head.reason
        reason = head.reason
        if not reason and head.returned and keep_logits:
            reason = _returned(head)
        if reason:
            found.reasons[(head.at or head.product.at).name] = reason
            continue
        call = _replace(graph, seen, head)
        members = [*head.chain, *([head.at] if head.at else [])]
        found.calls.append(call)
        found.members |= dict.fromkeys((n.name for n in members), call.__name__)
        gone += members
    found.dropped = _drop(graph, gone)
    for node in reversed(list(graph.nodes)):
        if node in gone:
            graph.erase_node(node)
    return found


def _replace(graph: fx.Graph, seen: Observed, head: Head) -> HeadCall:
    at = head.at
    assert at is not None
    call = HeadCall(head, seen.values[at].dtype)
    with graph.inserting_before(at):
        node = graph.call_function(call, call.arguments)
    node.meta.update(at.meta)
    seen.values[node], seen.calls[node], seen.grad[node] = seen.values[at], None, seen.grad[at]
    at.replace_all_uses_with(node)
    return call


def _drop(graph: fx.Graph, gone: list[fx.Node]) -> list[int]:
    """Return no logits; where they were among the results."""
    (output,) = graph.find_nodes(op="output")
    (results,) = output.args
    if not isinstance(results, tuple | list):
        return []
    dropped = [i for i, x in enumerate(results) if x in gone]
    if dropped:
        output.args = (tuple(x for x in results if x not in gone),)
    return dropped


def _returned(head: Head) -> str:
    m, n, _ = head.product.sizes
    size = f"{m} x {n}" if isinstance(m, int) else f"tokens x {n}"
    return (
        f"the logits are returned: {size} values stored, and a gradient as large; "
        "logits='none' avoids both"
    )
