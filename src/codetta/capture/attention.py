"""Attention whose mask is proved to be the causal one runs without the mask.

While torch.compile traces, model libraries cannot ask whether a mask is needed and build one of
(tokens, tokens), with which scaled_dot_product_attention has no fast kernel. A mask that depends on
no input is computed here, once, and compared with the causal one. A mask of unknown size is proved
by its formula (maskproof.py). A mask that depends on an input (padding, packed sequences) is never
touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from codetta.capture.maskproof import proved_causal
from codetta.capture.observe import Observed

_ATTENTION = "scaled_dot_product_attention"
#: Of scaled_dot_product_attention, in order.
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
#: Elements of a mask beyond which it is not computed: 2 GiB of booleans.
_LARGEST = 2**31
_RANDOM = torch.Tag.nondeterministic_seeded


class _Kept(Exception):
    """Why a mask is kept."""


def causal_masks(
    graph: fx.Graph, seen: Observed, skip: set[fx.Node], given: Mapping[str, str | None]
) -> list[str]:
    """Replace masks that equal the causal one by ``is_causal=True``, in place.

    Args:
        graph: any graph.
        seen: what its nodes do.
        skip: nodes that touch memory written into.
        given: for placeholders by name that are masks made by a calling graph: None where it is the
            causal one, or why it is not known to be.

    Returns:
        One note per mask.
    """
    verdicts: dict[fx.Node, str | None] = {}
    counts: dict[fx.Node, int] = {}
    for node in list(graph.nodes):
        if not is_attention(node):
            continue
        arguments = dict(zip(ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
        mask = arguments.get("attn_mask")
        if not isinstance(mask, fx.Node):
            continue
        if mask not in verdicts:
            verdicts[mask] = _unfit(mask, arguments, seen)
            if verdicts[mask] is None:
                known = mask.name in given
                verdicts[mask] = given[mask.name] if known else why_kept(mask, seen, skip)
        counts[mask] = counts.get(mask, 0) + 1
        if verdicts[mask] is None:
            arguments |= {"attn_mask": None, "is_causal": True}
            node.args = tuple(arguments.pop(n) for n in ARGUMENTS[:3])
            node.kwargs = arguments
    notes = []
    for mask, reason in verdicts.items():
        where = f"{mask.name}, the mask of {counts[mask]} attention(s),"
        if reason is None:
            notes.append(f"{where} is causal: replaced by is_causal=True")
            erase(graph, mask)
        else:
            notes.append(f"{where} is kept: {reason}")
    return notes


def is_attention(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == _ATTENTION


def may_be_mask(x: Any) -> bool:
    """Whether a value has the type of a square mask of truth values."""
    return (
        isinstance(x, Tensor)
        and x.dtype is torch.bool
        and x.ndim >= 2
        and bool(x.shape[-2] == x.shape[-1])
    )


def _unfit(mask: fx.Node, arguments: dict[str, Any], seen: Observed) -> str | None:
    """Why this attention needs its mask whatever the mask's values, or None."""
    value, q, k = (seen.values.get(n) for n in (mask, arguments["query"], arguments["key"]))
    if not (isinstance(value, Tensor) and isinstance(q, Tensor) and isinstance(k, Tensor)):
        return "it is not seen"
    if arguments.get("is_causal", False) is not False:
        return "is_causal is given, too"
    if value.dtype is not torch.bool:
        return "it is added to the scores"
    if not may_be_mask(value) or not q.shape[-2] == k.shape[-2] == value.shape[-1]:
        return "queries and keys are not the same tokens"
    return None


def why_kept(mask: fx.Node, seen: Observed, skip: set[fx.Node]) -> str | None:
    """None if a square mask is proved to be the causal one, or why it is not."""
    try:
        _prove(mask, seen, skip)
    except _Kept as reason:
        return str(reason)
    return None


def _prove(mask: fx.Node, seen: Observed, skip: set[fx.Node]) -> None:
    value = seen.values[mask]
    needed = _ancestors(mask)
    for node in needed:
        if node in skip:
            raise _Kept("it is written into")
        if node.op == "placeholder" and isinstance(seen.values.get(node), Tensor):
            raise _Kept(f"it depends on an input ({node.name})")
        if node.op == "get_attr":
            raise _Kept(f"it depends on a tensor of the model ({node.name})")
        if any(_RANDOM in call.op.tags for call in seen.calls.get(node) or ()):
            raise _Kept("it is random")
    if any(isinstance(s, torch.SymInt) for s in value.shape):
        if not proved_causal(mask, seen):
            raise _Kept("its size is not known, and its formula is not one that is proved causal")
        return
    if value.numel() > _LARGEST:
        raise _Kept("it is too large to be compared")
    order = [n for n in mask.graph.nodes if n in needed]
    found = _value(order, mask)
    causal = torch.ones(found.shape[-2:], dtype=torch.bool).tril()
    if not all(torch.equal(part, causal) for part in _distinct(found)):
        raise _Kept("it is not the causal mask")


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, stack = {node}, [node]
    while stack:
        for a in stack.pop().all_input_nodes:
            if a not in found:
                found.add(a)
                stack.append(a)
    return found


def _value(order: list[fx.Node], mask: fx.Node) -> Tensor:
    """The mask, computed on the CPU."""
    known: dict[fx.Node, Any] = {}
    with unset_fake_temporarily(), torch.no_grad():
        for node in order:
            args = fx.node.map_aggregate(node.args, _on_cpu)
            kwargs = fx.node.map_aggregate(node.kwargs, _on_cpu)
            args, kwargs = fx.node.map_arg((args, kwargs), known.__getitem__)
            if node.op == "call_function":
                assert callable(node.target)
                known[node] = node.target(*args, **kwargs)
            elif node.op == "call_method":
                known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                raise _Kept(f"it is made by {node.op}")
    found = known[mask]
    assert isinstance(found, Tensor)
    return found


def _on_cpu(x: Any) -> Any:
    if isinstance(x, torch.device) or (isinstance(x, str) and x.startswith("cuda")):
        return torch.device("cpu")
    return x


def _distinct(x: Tensor) -> Iterator[Tensor]:
    """Its matrices; those that an expansion repeats, once."""
    for axis in range(x.ndim - 2):
        if x.stride(axis) == 0 and x.shape[axis]:
            x = x.narrow(axis, 0, 1)
    yield from x.reshape(-1, *x.shape[-2:])


def erase(graph: fx.Graph, mask: fx.Node) -> None:
    """Remove what only led to the mask."""
    needed = _ancestors(mask)
    for node in reversed(list(graph.nodes)):
        computed = node.op in ("call_function", "call_method")
        if node in needed and computed and not node.users:
            graph.erase_node(node)
