"""What a bug report needs to know about the machine: `codetta env`.

Nothing here creates a CUDA context. GPUs are described by `nvidia-smi`, which asks the driver's
management library; torch is asked only where that tool is missing although torch sees a GPU.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from codetta._version import __version__

PACKAGES = (
    "triton",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "transformers",
    "accelerate",
    "gguf",
)
"""Distributions whose version changes what codetta does."""


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str  # "9.0"
    memory_gib: float | None  # None where the GPU shares the host's memory
    driver: str | None


@dataclass(frozen=True)
class Environment:
    codetta: str
    commit: str | None  # None outside a checkout; ends in "-dirty" with local changes
    backend: str  # the one a call uses unless told otherwise
    python: str
    system: str
    cpu: str
    cores: int  # those this process may use
    memory_gib: float | None
    torch: str  # with its build: "2.13.0+cpu"
    torch_cuda: str | None  # the CUDA version torch was built for
    gpus: tuple[Gpu, ...]
    packages: dict[str, str | None]
    variables: dict[str, str]


def env_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print what a bug report needs: versions, machine, GPU and the backend in use."""
    environment = collect()
    if as_json:
        typer.echo(json.dumps(asdict(environment), indent=2))
    else:
        Console().print(as_table(environment))


def collect() -> Environment:
    """The environment of this process. Imports torch; creates no CUDA context."""
    import torch

    from codetta.backends import default_backend

    return Environment(
        codetta=__version__,
        commit=_commit(),
        backend=default_backend(),
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_model(),
        cores=_usable_cores(),
        memory_gib=_memory_gib(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        gpus=_gpus(),
        packages={name: _version(name) for name in PACKAGES},
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("CODETTA_") or name == "CUDA_VISIBLE_DEVICES"
        },
    )


def as_table(environment: Environment) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _rows(environment):
        table.add_row(label, value)
    return table


def _rows(e: Environment) -> Iterator[tuple[str, str]]:
    yield "codetta", e.codetta if e.commit is None else f"{e.codetta} (commit {e.commit})"
    yield "backend", e.backend
    yield "python", e.python
    yield "system", e.system
    yield "cpu", f"{e.cpu}, {e.cores} cores"
    yield "memory", _gib(e.memory_gib)
    yield "torch", e.torch
    yield "torch cuda", e.torch_cuda or "none (CPU build)"
    if not e.gpus:
        yield "gpu", "none"
    for gpu in e.gpus:
        yield "gpu", f"{gpu.name}, capability {gpu.capability}, {_gib(gpu.memory_gib)}"
    for driver in sorted({gpu.driver for gpu in e.gpus if gpu.driver is not None}):
        yield "driver", driver
    for name, version in e.packages.items():
        yield name, version or "not installed"
    for name, value in e.variables.items():
        yield name, value


def _gib(amount: float | None) -> str:
    return "unknown" if amount is None else f"{amount:.1f} GiB"


def _commit() -> str | None:
    """The commit of the checkout this package is imported from, if it is one.

    A package installed into an environment that lies inside somebody's repository is not: hence the
    comparison of paths.
    """
    package = Path(__file__).resolve().parent
    root = _output("git", "-C", str(package), "rev-parse", "--show-toplevel")
    if root is None or Path(root).resolve() / "src" / "codetta" != package:
        return None
    # No tags: the version is known already, the hash is what is wanted.
    return _output(
        "git", "-C", root, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"
    )


def _cpu_model() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        model = _output("sysctl", "-n", "machdep.cpu.brand_string")
        if model is not None:
            return model
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # fewer than there are, in a container
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float | None:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not POSIX, or the name is unknown there
        return None
    return round(total / 2**30, 1)


def _gpus() -> tuple[Gpu, ...]:
    listing = _output(
        "nvidia-smi",
        "--query-gpu=name,compute_cap,memory.total,driver_version",
        "--format=csv,noheader,nounits",
    )
    if listing is not None:
        return tuple(_parse_gpu(line) for line in listing.splitlines() if line.count(",") == 3)

    import torch

    if not torch.cuda.is_available():
        return ()
    found = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return tuple(
        Gpu(p.name, f"{p.major}.{p.minor}", round(p.total_memory / 2**30, 1), None) for p in found
    )


def _parse_gpu(line: str) -> Gpu:
    """One line of nvidia-smi's CSV; its memory is in MiB, or "[N/A]" where memory is shared."""
    name, capability, memory_mib, driver = (field.strip() for field in line.split(","))
    try:
        memory_gib = round(float(memory_mib) / 1024, 1)
    except ValueError:
        return Gpu(name, capability, None, driver)
    return Gpu(name, capability, memory_gib, driver)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What `command` prints, or None if it is missing, fails, or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
