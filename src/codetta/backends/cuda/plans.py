"""Compiled kernels, one per program, dtypes, majors and configuration; sizes are free."""

from __future__ import annotations

from functools import lru_cache
from threading import RLock
from typing import Any

from torch import Tensor

from codetta.backends.cuda import quack
from codetta.backends.cuda.assembly import kind
from codetta.backends.cuda.capture import refuse
from codetta.backends.cuda.configs import Configuration

_KERNELS: dict[tuple[object, ...], Any] = {}
_COMPILING = RLock()  # the compiler keeps its state in globals


@lru_cache(maxsize=1024)
def epilogue(source: str) -> Any:
    """The QuACK epilogue of a generated module."""
    return quack.epilogue(source)


def kernel(
    source: str,
    config: Configuration,
    a: Tensor,
    b: Tensor,
    d: Tensor | None,
    c: Tensor | None,
    arguments: dict[str, Any],
    program: str = "",
    **options: Any,
) -> Any:
    """The kernel for tensors of these dtypes and majors, compiled the first time it is asked for.

    Args:
        source: text of the epilogue's module.
        arguments: its parameters and buffers by name.
        program: its name, for the error.
        options: as :func:`codetta.backends.cuda.quack.build` takes them.

    Raises:
        ColdCapture: it must be compiled and a stream is being captured.
    """
    kinds = tuple((name, kind(x)) for name, x in arguments.items())
    sides = (kind(a), kind(b), kind(d), kind(c))
    key = (source, config, a.device, *sides, kinds, *sorted(options.items()))
    if key not in _KERNELS:
        refuse(program)
        with _COMPILING:
            if key not in _KERNELS:
                made = quack.build(epilogue(source), a, b, d, c, arguments, config, **options)
                _KERNELS[key] = made
    return _KERNELS[key]
