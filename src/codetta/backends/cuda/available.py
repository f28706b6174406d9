"""Whether the fused backend can run here, found out without importing QuACK or touching a GPU.

A context is created only by whoever has CUDA tensors already; before that, the driver's own tool is
asked for the capability.
"""

from __future__ import annotations

import subprocess
from functools import lru_cache
from importlib import metadata

import torch

from codetta.backends.cuda.versions import INSTALL, VERSIONS

CAPABILITY = (9, 0)


def missing_package() -> str | None:
    """What is not installed or has another version, or None."""
    for name, wanted in VERSIONS.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            return f"{name} {wanted} is not installed"
        if found != wanted:
            return f"{name} is {found}, and {wanted} is needed"
    return None


def unavailable(device: torch.device | None = None) -> tuple[str, str] | None:
    """(reason, fix) if fused kernels cannot run on ``device``, or on any GPU here; else None."""
    index = device.index if device is not None else None
    return _unavailable(index, torch.cuda.is_initialized())


@lru_cache(maxsize=64)
def _unavailable(index: int | None, initialized: bool) -> tuple[str, str] | None:
    elsewhere = "Use 'reference' or 'auto': the reference backend runs on every device."
    if not torch.backends.cuda.is_built() or not torch.cuda.is_available():
        return "there is no CUDA device", elsewhere
    found = [_capability(index, initialized)] if index is not None else _capabilities(initialized)
    if CAPABILITY not in found:
        names = ", ".join(f"{major}.{minor}" for major, minor in found) or "unknown"
        return f"the fused kernels are for capability 9.0 (Hopper), this is {names}", elsewhere
    package = missing_package()
    return None if package is None else (package, INSTALL)


def _capability(index: int, initialized: bool) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index) if initialized else _capabilities(False)[index]


def _capabilities(initialized: bool) -> list[tuple[int, int]]:
    if initialized:
        count = torch.cuda.device_count()
        return [torch.cuda.get_device_capability(i) for i in range(count)]
    command = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        parts = (line.split(".") for line in done.stdout.split())
        return [(int(major), int(minor)) for major, minor in parts]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
