"""Grouped-query attention without copies of its keys and values.

Where a mask is given, model libraries repeat each head of k and v for the queries that share it
and call scaled_dot_product_attention as if all heads were different. Once a mask has been proved
causal (attention.py) the kernels that take shared heads can run: k and v are then read as they are,
their gradients are made once per head, and no kernel sums them over copies. The repetition is
``enable_gqa`` by definition (``repeat_interleave`` over the heads), so it is only looked for by its
form: an axis of size 1 after the heads, expanded, and merged with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from codetta.capture.attention import ARGUMENTS, is_attention
from codetta.capture.observe import Observed

aten = torch.ops.aten
_INSERTS = frozenset({aten.unsqueeze.default, aten.slice.Tensor, aten.alias.default})
_EXPANDS = frozenset({aten.expand.default})
_MERGES = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default,
})  # fmt: skip
#: Only these have kernels with shared heads on GPUs; others would compute all scores.
_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST = 256


def shared_heads(graph: fx.Graph, seen: Observed, skip: set[fx.Node]) -> list[str]:
    """Hand k and v to attention without a mask before their heads are repeated, in place.

    Args:
        graph: any graph.
        seen: what its nodes do.
        skip: nodes that touch memory written into.

    Returns:
        One note if there is such an attention.
    """
    counts: dict[tuple[int, int], int] = {}
    for node in graph.nodes:
        if not is_attention(node):
            continue
        given = dict(zip(ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
        if given.get("attn_mask") is not None or given.get("enable_gqa"):
            continue
        key, value = (_source(given[n], seen, skip) for n in ("key", "value"))
        if key is None or value is None:
            continue
        q, k, v = (seen.values.get(n) for n in (given["query"], key, value))
        repeated = [seen.values[given[n]] for n in ("key", "value")]
        if q is None or k is None or not _fits(q, k, v, repeated):
            continue
        given |= {"key": key, "value": value, "enable_gqa": True}
        heads = (int(q.shape[1]), int(k.shape[1]))
        counts[heads] = counts.get(heads, 0) + 1
        node.args = tuple(given.pop(n) for n in ARGUMENTS[:3])
        node.kwargs = given
    return [
        f"keys and values of {count} attention(s) are not repeated from {few} to {many} heads: "
        "enable_gqa=True"
        for (many, few), count in counts.items()
    ]


def _fits(q: Any, k: Any, v: Any, repeated: list[Tensor]) -> bool:
    return bool(
        isinstance(q, Tensor)
        and q.dtype in _DTYPES
        and q.dtype == k.dtype == v.dtype
        and q.ndim == 4
        and k.shape[1] == v.shape[1]
        and all(q.shape[1] == x.shape[1] for x in repeated)  # none is broadcast
        and q.shape[-1] == k.shape[-1] == v.shape[-1] <= _WIDEST
    )


def _source(node: Any, seen: Observed, skip: set[fx.Node]) -> fx.Node | None:
    """What ``node`` repeats the heads of: (B, H, S, D) where it is (B, H r, S, D), r > 1."""
    chain = [node]
    for allowed in (_MERGES, _EXPANDS, _INSERTS):
        below = _input(chain[-1], allowed, seen, skip)
        if below is None:
            return None
        chain.append(below)
    found = [seen.values[n] for n in chain]
    if [x.ndim for x in found] != [4, 5, 5, 4]:
        return None
    b, h, s, d = found[3].shape
    r = found[1].shape[2]
    expected = ((b, h * r, s, d), (b, h, r, s, d), (b, h, 1, s, d))
    same = all(
        statically_known_true(x == y)
        for tensor, shape in zip(found, expected, strict=False)
        for x, y in zip(tensor.shape, shape, strict=True)
    )
    return chain[-1] if same and statically_known_true(r > 1) else None


def _input(
    node: Any, allowed: frozenset[Any], seen: Observed, skip: set[fx.Node]
) -> fx.Node | None:
    """The one tensor that a node moves with ``allowed`` operators only."""
    if node in skip or not isinstance(seen.values.get(node), Tensor):
        return None
    calls = seen.calls.get(node)
    tensors = [n for n in node.all_input_nodes if isinstance(seen.values.get(n), Tensor)]
    if not calls or len(tensors) != 1 or any(c.op not in allowed for c in calls):
        return None
    return tensors[0]
