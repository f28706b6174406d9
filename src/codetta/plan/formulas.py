"""Nodes as formulas: what a Program or a piece of a Plan computes, for people to read.

A value that is used once is written where it is used; what is used more often, or is a result, gets
a line of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from codetta.language.values import Node, attrs_of

#: Infix operators and how tightly they bind.
_INFIX = {
    "lt": ("<", 1), "le": ("<=", 1), "gt": (">", 1), "ge": (">=", 1), "eq": ("==", 1),
    "ne": ("!=", 1), "add": ("+", 2), "sub": ("-", 2), "mul": ("*", 3), "div": ("/", 3),
}  # fmt: skip
_TIGHT = 5
_SHORT = {"round_to": "round"}
_DEFAULTS: Mapping[str, Any] = {"inverse": False, "pairs": "adjacent", "dtype": "operand"}
_HIDDEN = frozenset({"path", "width", "axes", "rows", "layout", "reduction"})


class Formulas:
    """Formulas of ``nodes``.

    Args:
        results: (node, name) of what is computed.
        leaf: name of a node that is given, or None for one that is computed.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        results: Sequence[tuple[int, str]],
        leaf: Callable[[int], str | None],
    ) -> None:
        self.nodes, self.leaf = nodes, leaf
        self.lines: list[tuple[str, str]] = []
        self._uses = Counter(a for node in nodes for a in node.args)
        self._names: dict[int, str] = {}
        wanted: dict[int, str] = {}
        for i, name in results:
            wanted.setdefault(i, name)
        self._wanted = wanted
        for i, name in results:
            if wanted[i] != name:  # one value under two names
                self.lines.append((name, self._text(i)[0]))
            else:
                self._text(i)

    def _text(self, i: int) -> tuple[str, int]:
        """Formula of node i and how tightly its outermost operator binds."""
        given = self._names.get(i) or self.leaf(i)
        node = self.nodes[i]
        if given is None and node.op == "const":
            number = node.attr("value")
            given = f"{number:.6g}" if number >= 0 else f"({number:.6g})"
        if given is None and node.op == "extent":
            given = "M" if node.attr("axis") == "m" else str(node.attr("width"))
        if given is not None:
            if i in self._wanted and i not in self._names:
                self._names[i] = self._wanted[i]
                self.lines.append((self._wanted[i], given))
            return given, _TIGHT
        text, level = self._operation(node)
        if i not in self._wanted and self._uses[i] < 2:
            return text, level
        self._names[i] = (
            self._wanted.get(i) or f"t{sum(n not in self._wanted for n in self._names)}"
        )
        self.lines.append((self._names[i], text))
        return self._names[i], _TIGHT

    def _operation(self, node: Node) -> tuple[str, int]:
        args = [self._text(a) for a in node.args]
        if node.op in _INFIX:
            sign, level = _INFIX[node.op]
            left, right = (
                text if inner >= level + side else f"({text})"
                for side, (text, inner) in enumerate(args)
            )
            return f"{left} {sign} {right}", level
        if node.op == "neg":
            text, level = args[0]
            return f"-{text if level >= 3 else f'({text})'}", 3
        if node.op == "pow":
            text, level = args[0]
            return f"{text if level == _TIGHT else f'({text})'} ** {node.attr('exponent'):g}", 4
        if node.op == "broadcast":
            return args[0]
        if node.op == "unpack":
            return f"unpack({args[0][0]})[{node.attr('member')}]", _TIGHT
        inside = [text for text, _ in args] + _shown(attrs_of(node))
        return f"{_SHORT.get(node.op, node.op)}({', '.join(inside)})", _TIGHT


def _shown(attrs: Mapping[str, Any]) -> list[str]:
    hidden = set(_HIDDEN)
    if attrs.get("rotary_dim") == attrs.get("head_dim"):
        hidden.add("rotary_dim")
    return [f"{k}={v}" for k, v in attrs.items() if k not in hidden and _DEFAULTS.get(k) != v]
