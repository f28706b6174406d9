"""The fused backend chosen for a test, on a GPU or emulated, with its tensors on its device."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import codetta
from codetta import functional, nn, ops, plan
from codetta.backends import select
from codetta.backends.cuda import available
from helpers import emulation


@contextmanager
def running(name: str) -> Iterator[None]:
    """Everything in the block runs on the backend 'reference', 'cuda' or 'emulated'.

    Raises:
        BackendUnavailable: it cannot run here.
    """
    if name == "emulated":
        with everywhere_emulated(), codetta.use_backend("cuda"):
            yield
        return
    with codetta.use_backend(name), torch.device("cuda" if name == "cuda" else "cpu"):
        yield


@contextmanager
def everywhere_emulated() -> Iterator[None]:
    """``use_backend("cuda")`` on CPU tensors gives the emulated backend, through every caller."""
    _load_everything()
    original = select.backend_for
    with emulation.emulated() as backend, pytest.MonkeyPatch.context() as patch:

        def backend_for(x):
            return backend if select.chosen_backend() == "cuda" else original(x)

        patch.setattr(available, "unavailable", lambda device=None: None)
        for module in _users_of(original):
            patch.setattr(module, "backend_for", backend_for)
        yield
    if left := _users_of(backend_for):
        raise RuntimeError(f"loaded while patched, and so patched for good: {left}")


@lru_cache(maxsize=1)
def _load_everything() -> None:
    """A module that is loaded later would import the patched function."""
    for package in (functional, nn, ops, plan):
        for found in pkgutil.walk_packages(
            getattr(package, "__path__", ()), f"{package.__name__}."
        ):
            importlib.import_module(found.name)


def _users_of(backend_for: Callable[..., Any]) -> list[ModuleType]:
    loaded = [m for name, m in sys.modules.items() if name.split(".")[0] == "codetta"]
    return [m for m in loaded if vars(m).get("backend_for") is backend_for]


@contextmanager
def broken(result: str | None, mutant: Callable[[Tensor], Tensor] | None) -> Iterator[set[str]]:
    """Emulated kernels return ``mutant`` of one result: 'D', an auxiliary store's or a sink's name.

    Yields the names of all results, filled as kernels run.
    """
    original, names = emulation.function_of, set()

    def function_of(source: str) -> Callable[..., dict[str, Any]]:
        function = original(source)

        def changed(*arguments: Any, **named: Any) -> dict[str, Any]:
            made = dict(function(*arguments, **named))
            names.update(made)
            if result in made and mutant is not None:
                made[result] = _mutated(result, made[result], mutant)
            return made

        return changed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulation, "function_of", function_of)
        yield names


def _mutated(result: str, x: Any, mutant: Callable[[Tensor], Tensor]) -> Any:
    """Of a pair both lanes; of a sum with a payload the first factor."""
    if not isinstance(x, tuple):
        return mutant(x)
    first, *rest = x
    return (mutant(first), *(rest if result.startswith("s_") else map(mutant, rest)))
