"""The user's own measurements: one small file per kernel and shape, written by ``codetta tune``.

A file answers for one key alone: GPU, driver, versions, program, dtypes, layouts, shape bucket. It
holds that key beside the configuration, and counts only if both are what they should be; anything
else is a miss. Writers replace whole files, so any number of processes may read and write at once.
Where nothing can be written, results are kept for the life of the process, and a warning says so.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codetta.backends.cuda.configs import Configuration
from codetta.backends.cuda.forms import Lowered
from codetta.backends.cuda.versions import VERSIONS
from codetta.language.program import Operand, Output, Program

VARIABLE = "CODETTA_CACHE_DIR"
_FORMAT = 1
_MEMORY: dict[str, Configuration] = {}

Key = dict[str, Any]


def folder() -> Path | None:
    """Where files are: in ``$CODETTA_CACHE_DIR``, else the user's cache; None without a home."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named) / "configurations"
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return base / "codetta" / "configurations"


def key_of(
    lowered: Lowered,
    m: int,
    n: int,
    k: int,
    layout: str,
    operands: Sequence[Tensor],
    machine: Key,
) -> Key:
    """What a measurement depends on.

    Args:
        operands: flat; their dtypes and majors count.
        machine: see :func:`machine`.
    """
    return machine | {
        "program": canonical(lowered.program).digest,
        "operand": lowered.operand,
        "operands": [f"{x.dtype} {_major(x)}" for x in operands],
        "layout": layout,
        "bucket": [bucket(m), bucket(n), bucket(k)],
    }


def bucket(extent: int) -> int:
    """Extents within a factor of about 1.2 of each other's centre share one: half octaves."""
    return round(2 * math.log2(max(extent, 1)))


@lru_cache(maxsize=16)
def _machine(device: int) -> tuple[tuple[str, str], ...]:
    found = {"gpu": torch.cuda.get_device_name(device), "driver": _driver()}
    return tuple((found | versions()).items())


def machine(device: int) -> Key:
    """GPU, driver and versions, by name."""
    return dict(_machine(device))


def versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _driver() -> str:
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        return " ".join(first.split())
    except (OSError, IndexError):
        return str(getattr(torch._C, "_cuda_getDriverVersion", lambda: "")())


def canonical(program: Program) -> Program:
    """The program under neutral names: two that differ in names alone are one kernel."""
    names = {o.name: f"x{i}" for i, o in enumerate(program.operands)}
    return Program(
        "kernel",
        tuple(Operand(names[o.name], o.kind, o.width, o.pairs) for o in program.operands),
        tuple(
            replace(x, attrs=(("name", names[x.attr("name")]),)) if x.op == "operand" else x
            for x in program.nodes
        ),
        tuple(Output(f"y{i}", o.node, o.dtype) for i, o in enumerate(program.outputs)),
        program.bare,
    )


def _major(x: Tensor) -> str:
    return "rows" if x.ndim < 2 or x.stride(-1) == 1 else "columns"


# ------------------------------------------------------------------------------ read and write
def lookup(
    lowered: Lowered,
    m: int,
    n: int,
    k: int,
    layout: str,
    operands: Sequence[Tensor],
    device: int | None,
) -> Configuration | None:
    """The configuration measured on this machine for such a call, or None."""
    if device is None:
        return None
    return load(key_of(lowered, m, n, k, layout, operands, machine(device)))


def load(key: Key) -> Configuration | None:
    """The configuration stored under a key; None on any doubt."""
    name = _name(key)
    if name in _MEMORY:
        return _MEMORY[name]
    where = folder()
    if where is None:
        return None
    try:
        data = json.loads((where / name).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(data, dict) or data.get("format") != _FORMAT or data.get("key") != key:
        return None
    ms, date = data.get("ms"), data.get("date")
    if not isinstance(ms, float) or not ms > 0 or not isinstance(date, str):
        return None
    return Configuration.of(data.get("config"), f"tuned here on {date}, {ms:.4g} ms")


def save(key: Key, config: Configuration, ms: float, date: str) -> Path | None:
    """Store a measurement; the path, or None if it is only remembered by this process."""
    name, where = _name(key), folder()
    kept = replace(config, provenance=f"tuned here on {date}, {ms:.4g} ms")
    record = {"format": _FORMAT, "key": key, "config": config.data(), "ms": ms, "date": date}
    try:
        if where is None:
            raise OSError("there is no home directory")
        where.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(prefix=f".{name}", dir=where)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(record, file, indent=1)
            os.replace(part, where / name)
        except BaseException:
            os.unlink(part)
            raise
    except OSError as error:
        _MEMORY[name] = kept
        _warn_memory(str(where), str(error))
        return None
    _MEMORY.pop(name, None)
    return where / name


def _name(key: Key) -> str:
    text = json.dumps(key, sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.json"


@lru_cache(maxsize=1)
def _warn_memory(where: str, why: str) -> None:
    warnings.warn(
        f"tuned configurations are kept for this process only, since {where} cannot be written "
        f"({why}). Set {VARIABLE} to a directory that can.",
        stacklevel=4,
    )
