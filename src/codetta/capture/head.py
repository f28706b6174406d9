"""Vocabulary heads whose logits only a cross-entropy reads.

Followed by dataflow, in aten operators: a product with a weight; scalings, a cap, casts to
wider dtypes; views, permutations and slices of the tokens; log_softmax over the vocabulary and
nll_loss of it. What moves tokens of the logits can move those of the hidden states instead, so that

    loss = cross_entropy(moved(cap · tanh(scale · x Wᵀ / cap)), target)

is one call on moved(x), W and target (:class:`~codetta.capture.headcall.HeadCall`), and no logits
are stored. How the targets are made (padding, shifting) and what becomes of the loss (a division by
a number of items) stays in the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from codetta.capture.logits import MOVES, RULES, Logits, Loss, Product, Source, Unfit
from codetta.capture.moves import Move, Unmovable, moved
from codetta.capture.observe import Call, Observed, tensors_in

aten = torch.ops.aten


@dataclass
class Head:
    """A head and what was found about it.

    Attributes:
        chain: nodes that hold logits; at: the node of the loss; loss: what it computes.
        reason: why it stays as it is, if it does.
        returned: nodes of the chain that the graph returns.
    """

    product: Product
    chain: list[fx.Node] = field(default_factory=list)
    at: fx.Node | None = None
    loss: Loss | None = None
    reason: str = ""
    returned: list[fx.Node] = field(default_factory=list)


def find_heads(graph: fx.Graph, seen: Observed, skip: set[fx.Node]) -> list[Head]:
    """Heads that reach a log_softmax, in order; those without a ``reason`` can be one call."""
    reader = _Reader(graph, seen)
    for node in graph.nodes:
        reader.read(node)
    return [_judged(h, graph, skip) for h in reader.heads.values() if h.loss or h.reason]


def _judged(head: Head, graph: fx.Graph, skip: set[fx.Node]) -> Head:
    """Look at who reads the logits."""
    (output,) = graph.find_nodes(op="output")
    inside = {*head.chain, head.at}
    others = []
    for node in head.chain:
        if output in node.users:
            head.returned.append(node)
        others += [u for u in node.users if u not in inside and u is not output]
    _, classes, width = head.product.sizes
    if head.reason:
        return head
    if others:
        names = ", ".join(sorted({_what(u) for u in others}))
        head.reason = f"its logits are also read by {names}"
    elif inside & skip:
        head.reason = "it touches memory that is written into, or gradients are switched off there"
    elif classes <= width:
        head.reason = f"its {classes} logits are no more than its {width} hidden values"
    return head


def _what(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


class _Reader:
    """What is known of tensors, by identity."""

    def __init__(self, graph: fx.Graph, seen: Observed) -> None:
        self.seen = seen
        self.known: dict[int, Logits | Loss] = {}
        self.made: dict[int, Call] = {}
        self.names: dict[int, fx.Node] = {}
        self.heads: dict[int, Head] = {}
        self.spoiled: dict[int, tuple[Logits, str]] = {}
        self.node: fx.Node = next(iter(graph.nodes))

    def read(self, node: fx.Node) -> None:
        self.node = node
        value = self.seen.values.get(node)
        for call in self.seen.calls.get(node) or ():
            for x in tensors_in(call.result):
                self.made.setdefault(id(x), call)
            self._call(call)
        if isinstance(value, Tensor):
            self.names.setdefault(id(value), node)
            self._named(node, self.known.get(id(value)))

    def _named(self, node: fx.Node, found: Logits | Loss | None) -> None:
        if isinstance(found, Logits):
            self.heads[id(found.product)].chain.append(node)
        elif isinstance(found, Loss):
            del self.known[id(self.seen.values[node])]  # what becomes of it does not matter
            head = self.heads[id(found.logits.product)]
            if head.loss is None:
                head.at, head.loss = node, found
            elif head.loss is not found and not head.reason:
                head.reason = "its logits are read by several losses"

    def _call(self, call: Call) -> None:
        if call.op in (aten.mm.default, aten.addmm.default):
            self._product(call)
            return
        given = tensors_in([*call.args, *call.kwargs.values()])
        spoiled = [self.spoiled[id(x)] for x in given if id(x) in self.spoiled]
        for logits, reason in spoiled:
            self._spoil(call, logits, reason)
        read = [x for x in given if id(x) in self.known]
        if not read:
            return
        first = self.known[id(read[0])]
        try:
            if call.op not in RULES or read[0] is not call.args[0] or len(read) > 1 or spoiled:
                raise Unfit(f"{call.op} reads it")
            made = RULES[call.op](self, call, first, *call.args[1:], **call.kwargs)
        except (Unfit, Unmovable) as reason:
            for x in read:
                found = self.known[id(x)]
                logits = found.logits if isinstance(found, Loss) else found
                self._spoil(call, logits, str(reason))
            return
        result = call.result[0] if isinstance(call.result, tuple | list) else call.result
        self.known.setdefault(id(result), made)

    def _spoil(self, call: Call, logits: Logits, reason: str) -> None:
        """What is made of logits by other means is followed to a log_softmax, to give the reason.

        That of a product that leads to none is of no interest: it is no head's.
        """
        for x in tensors_in(call.result):
            self.spoiled.setdefault(id(x), (logits, reason))
        head = self.heads[id(logits.product)]
        if (logits.log or call.op is aten._log_softmax.default) and not head.reason:
            head.at, head.reason = self.node, f"no plain cross-entropy: {reason}"

    def _product(self, call: Call) -> None:
        bias = call.args[0] if call.op is aten.addmm.default else None
        left, right = call.args[-2:] if bias is None else call.args[1:3]
        if call.kwargs or not isinstance(right.shape[1], int) or not isinstance(left.shape[1], int):
            return
        try:
            x = self.source(left, left.ndim - 1)
            matrix, transposed = self._matrix(right)
            row = None if bias is None else self._row(bias)
        except Unmovable:
            return
        sizes = (left.shape[0], int(right.shape[1]), int(left.shape[1]))
        product = Product(self.node, x, matrix, transposed, row, sizes)
        self.heads[id(product)] = Head(product)
        self.known[id(call.result)] = Logits(product, (), 1)

    # ---- operands
    def source(self, x: Tensor, axis: int | None) -> Source:
        """A tensor as a named one whose tokens are moved; ``axis`` is that of its features."""
        moves: list[Move] = []
        dtype = x.dtype
        while id(x) not in self.names:
            call = self.made.get(id(x))
            if call is None or call.op not in MOVES | {aten._to_copy.default}:
                raise Unmovable("an operand that has no name in the graph")
            parent = call.args[0]
            if call.op is aten._to_copy.default:
                if parent.device != x.device or not parent.is_floating_point():
                    raise Unmovable("a copy to another device or from integers")
            else:
                move, axis = moved(call, axis, backwards=True)
                moves += [] if move is None else [move]
            x = parent
        return Source(self.names[id(x)], dtype, tuple(reversed(moves)))

    def _matrix(self, x: Tensor) -> tuple[Source, bool]:
        """A weight (K, N) as a named tensor, and whether that is (N, K)."""
        dtype, turned = x.dtype, False
        while id(x) not in self.names:
            call = self.made.get(id(x))
            if call is not None and call.op is aten.t.default:
                turned = not turned
            elif call is None or call.op is not aten._to_copy.default:
                raise Unmovable("a weight that has no name in the graph")
            x = call.args[0]
        return Source(self.names[id(x)], dtype), turned

    def _row(self, x: Tensor) -> Source:
        source = self.source(x, None)
        if source.moves or x.ndim != 1:
            raise Unmovable("a bias that is no vector")
        return source
