"""The machine that a report comes from."""

from __future__ import annotations

import platform
from functools import lru_cache

import torch

from codetta._version import __version__
from codetta.backends.cuda import config_cache
from codetta.backends.cuda.available import unavailable


def no_gpu() -> str:
    """Why kernels cannot be run and timed here, or ""."""
    problem = unavailable()
    return "" if problem is None else problem[0]


@lru_cache(maxsize=1)
def environment() -> dict[str, str]:
    """GPU, driver and versions, by name; "" is what is not there."""
    found = {"codetta": __version__, "python": platform.python_version(), "gpu": "", "driver": ""}
    if no_gpu():
        return found | config_cache.versions()
    return found | config_cache.machine(torch.cuda.current_device())
