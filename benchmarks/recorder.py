"""Which kernels a piece of code launches, with their tensors, so that each can be run again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

#: Other operators are recorded from this size on; below it they are bookkeeping.
LEAST_BYTES = 1 << 14


@dataclass
class Call:
    """One operator call.

    Attributes:
        op: namespace::name.
        name: of the program or plan it runs, else the operator's.
        function: the operator.
        arguments: what it was called with, tensors left out, and how to put them back.
        tensors: its tensor arguments.
        written: bytes of its results.
        phase: 'forward' or 'backward'.
    """

    op: str
    name: str
    function: Any
    arguments: tuple[list[Any], Any]
    tensors: list[Tensor]
    written: int
    phase: str = ""

    def again(self, *tensors: Tensor) -> Any:
        """The same call on other tensors, below autograd."""
        flat, spec = self.arguments
        arrays = iter(tensors)
        given = [next(arrays) if isinstance(x, _Here) else x for x in flat]
        args, kwargs = tree_unflatten(given, spec)
        with torch.no_grad():
            return self.function(*args, **kwargs)


class _Here:
    """Where a tensor goes."""


def record(run: Callable[[], Any]) -> tuple[list[Call], Any]:
    """Calls of the codetta operators and of all others that move memory; and what ``run`` gave."""
    with _Recorder() as recorder:
        result = run()
    return recorder.calls, result


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        flat, spec = tree_flatten((args, kwargs))
        tensors = [x.detach() for x in flat if isinstance(x, Tensor)]
        op = func._schema.name
        written = _fresh_bytes(result, tensors) or (_bytes(result) if _mutates(func) else 0)
        ours = func.namespace == "codetta"
        moves = tensors and written >= LEAST_BYTES and not op.startswith("aten::empty")
        if ours or moves:
            slots = [_Here() if isinstance(x, Tensor) else x for x in flat]
            name = _name(flat) if ours else op
            self.calls.append(Call(op, name, func, (slots, spec), tensors, written))
        return result


def _mutates(func: Any) -> bool:
    return bool(func._schema.is_mutable)


def _fresh_bytes(result: Any, given: list[Tensor]) -> int:
    """Bytes of results in memory of their own; views have none."""
    old = {x.untyped_storage().data_ptr() for x in given}
    made = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
    return sum(
        x.numel() * x.element_size() for x in made if x.untyped_storage().data_ptr() not in old
    )


def _bytes(result: Any) -> int:
    made = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in made)


def _name(flat: list[Any]) -> str:
    """Name of the program or plan in an operator's text argument: '<kind> name(...)'."""
    text = next((x for x in flat if isinstance(x, str)), "")
    head = text.split("(", 1)[0].split("\n", 1)[0].split()
    return head[-1] if head else "?"
