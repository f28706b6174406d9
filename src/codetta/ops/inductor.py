"""The library operators as Inductor calls them: as they are.

An operator that Inductor has no lowering for gets one when a graph with it is compiled, which calls
the operator. That of torch 2.11 also formats, for a log message that nobody has asked for, all
that the operator reads, with what that was computed from, and so on. A residual stream is read
twice in each layer, so the text doubles from layer to layer: a loss behind 16 layers took longer
than anybody waits. (That of 2.13 formats when asked.) The lowering is the same when it is made
beforehand, without the message.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._library.utils import get_layout_constraint_tag

P = ParamSpec("P")
T = TypeVar("T")


def register_fake(
    name: str, library: torch.library.Library
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """``torch.library.register_fake`` for ``codetta::name``, whose lowering Inductor then knows."""

    def register(fake: Callable[P, T]) -> Callable[P, T]:
        @wraps(fake)
        def traced(*args: P.args, **kwargs: P.kwargs) -> T:
            tell_inductor(getattr(torch.ops.codetta, name).default)
            return fake(*args, **kwargs)

        torch.library.register_fake(f"codetta::{name}", traced, lib=library)
        return fake

    return register


def tell_inductor(operator: Any) -> None:
    """Give Inductor the lowering of an operator that it would make itself, if it is loaded.

    Called where the operator is traced: by then Inductor is loaded if it compiles the graph.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    # None of the names is public. Where one is gone Inductor does it, as described above.
    with contextlib.suppress(AttributeError, TypeError):
        if operator not in lowering.lowerings:
            tag = get_layout_constraint_tag(operator, with_default=True)
            constraint = lowering.tag_to_layout_constraint(tag)
            lowering.make_fallback(operator, layout_constraint=constraint)
