"""Which operators a piece of code calls, as a dispatch trace sees them."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Spy(TorchDispatchMode):
    """Records the codetta operators called inside the ``with`` block.

    ``calls`` has (operator name, shapes of the results); ``names`` only the names; ``texts`` has
    (operator name, argument) of the arguments that are strings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
        self.texts: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "codetta":
            made = [out] if isinstance(out, torch.Tensor) else out or ()
            shapes = tuple(tuple(x.shape) for x in made)
            name = func._schema.name.removeprefix("codetta::")
            self.calls.append((name, shapes))
            self.texts += [(name, x) for x in args if isinstance(x, str)]
        return out

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]
