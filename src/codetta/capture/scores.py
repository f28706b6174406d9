"""Whether a tensor reaches nothing but attention scores.

Scores do not change when the columns of q and k are permuted alike within a head (R9). That may be
used only where it is proved, by following every use down to an attention's query or key.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

_ATTENTION = "scaled_dot_product_attention"
#: What may lie between: it moves or repeats heads and tokens, never the columns of a head.
_PASSING = frozenset({"expand", "reshape", "contiguous", "view", "unsqueeze", "transpose", "to"})


def scores_only(nodes: Iterable[fx.Node]) -> bool:
    """Whether all of ``nodes`` (at least one) reach nothing but scores."""
    found = list(nodes)
    return bool(found) and all(map(_reaches_scores, found))


def _reaches_scores(node: fx.Node) -> bool:
    return all(_harmless(node, user) for user in node.users)


def _harmless(node: fx.Node, user: fx.Node) -> bool:
    name = getattr(user.target, "__name__", str(user.target))
    if name == _ATTENTION:
        arguments = {str(i): x for i, x in enumerate(user.args)} | user.kwargs
        return all(k in ("0", "1", "query", "key") for k, x in arguments.items() if x is node)
    passing = name in _PASSING or (name == "getitem" and _inserts_axes(user))
    return passing and _reaches_scores(user)


def _inserts_axes(node: fx.Node) -> bool:
    index = node.args[1]
    items = index if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or i == slice(None) for i in items)
