"""Broken kernels. A test of values is worth something only if it fails on each of them.

def check(): ...asserts...
check()
fails_when_broken(check)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from codetta.backends.calls import ReferenceBackend


def zeroed(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def sign_flipped(x: Tensor) -> Tensor:
    return -x


def one_tile_dropped(x: Tensor) -> Tensor:
    x = x.clone()
    x[tuple(slice(0, -(-size // 2)) for size in x.shape)] = 0
    return x


def rows_shuffled(x: Tensor) -> Tensor:
    return x.roll(1, 0) if x.ndim else x + 1


def wrong_tile(x: Tensor) -> Tensor:
    """The partial of the neighbouring tile."""
    return x.roll(1, -1)


MUTANTS = (zeroed, sign_flipped, one_tile_dropped, rows_shuffled)


@contextmanager
def broken(mutant: Callable[[Tensor], Tensor], ops: tuple[str, ...]) -> Iterator[None]:
    """The backend with every result of the named operators changed."""
    with pytest.MonkeyPatch.context() as patch:
        for op in ops:
            original = getattr(ReferenceBackend, op)

            def changed(self, *arguments, _original=original, **options):
                return [mutant(x) for x in _original(self, *arguments, **options)]

            patch.setattr(ReferenceBackend, op, changed)
        yield


def fails_when_broken(
    check: Callable[[], None],
    mutants: tuple[Callable[[Tensor], Tensor], ...] = MUTANTS,
    ops: tuple[str, ...] = ("gemm",),
) -> None:
    """Assert that ``check`` raises AssertionError under each mutant."""
    for mutant in mutants:
        with broken(mutant, ops):
            try:
                check()
            except AssertionError:
                continue
        pytest.fail(f"the check passes on a broken kernel: {mutant.__name__}")
