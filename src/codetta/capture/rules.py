"""The table of aten operators that can be written as a Plan.

One small function per operator, in arithmetic.py, products.py and views.py. Each takes the lens,
the result on fake tensors and the call's arguments, and returns forms; :class:`Unliftable` says why
a call cannot be written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


class Unliftable(Exception):
    """Why a call is not part of a Plan."""


Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
#: Operators that move nothing: a node of these alone stays with the tensor it views.
VIEWS = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default,
        aten.clone.default, aten.contiguous.default, aten.expand.default, aten.unsqueeze.default,
        aten.squeeze.dim, aten.transpose.int, aten.permute.default, aten.t.default,
        aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.select.int,
    }
)  # fmt: skip


def rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Register a function for operators (decorator)."""

    def register(function: Rule) -> Rule:
        for op in ops:
            assert op not in RULES, f"{op} has a rule already"
            RULES[op] = function
        return function

    return register
