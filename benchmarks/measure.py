"""Timing, statistics and provenance shared by the benchmarks.

A GPU is timed by CUDA events around several calls in a row, so that the host runs ahead as it does
in training and the first launch's latency decides nothing. Without a GPU the same code runs with
the host's clock, to test the scripts.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codetta.tuning.comparison import ratio as ratio  # the statistics of the benchmarks

PACKAGES = (
    "torch", "triton", "quack-kernels", "nvidia-cutlass-dsl", "liger-kernel", "cut-cross-entropy",
    "transformers",
)  # fmt: skip
MIN_ROUNDS = 5


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class Budget:
    """Seconds a run may take."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        return self.end - time.monotonic()


# ------------------------------------------------------------------------------------- timing
def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(run: Callable[[], Any], calls: int = 1) -> float:
    """Milliseconds per call of ``calls`` consecutive ones."""
    if not torch.cuda.is_available():
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - begun) * 1e3 / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def interleaved(
    runs: Mapping[str, tuple[Callable[[], Any], int]],
    rounds: int,
    budget: Budget,
    warmup: int = 2,
) -> dict[str, list[float]]:
    """Milliseconds of each run, round by round, in a new random order every round.

    ``runs`` has (what to time, consecutive calls). Ends early, after MIN_ROUNDS, when the budget is
    used up.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + warmup):
        if i >= warmup + MIN_ROUNDS and budget.left() < 0:
            break
        order = list(runs)
        random.Random(i).shuffle(order)
        for name in order:
            run, calls = runs[name]
            elapsed = timed(run, calls)
            if i >= warmup:
                times[name].append(elapsed)
    return times


def peak(run: Callable[[], Any], clear: Callable[[], Any]) -> int:
    """Peak memory of a run above what is allocated before it, in bytes; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    run()
    clear()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() - before
    clear()
    return found


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------------- statistics
def relative(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖ in fp32."""
    return float((a.float() - b.float()).norm() / b.float().norm())


# --------------------------------------------------------------------------------- provenance
def output(*command: str) -> str:
    """What a command prints; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def gpu_state() -> str:
    """Clocks, power and temperature now; empty without a GPU."""
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    return output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")


def environment() -> dict[str, str]:
    """GPU, driver, limits, versions, date and commit.

    Where there is no git checkout the commit is what the variable CODETTA_COMMIT says.
    """
    fields = "name,driver_version,power.limit,clocks.max.sm"
    found = {
        "gpu": output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"),
        "state": gpu_state(),
        "cuda": str(torch.version.cuda),
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": commit(),
    }
    return found | {p: version(p) for p in PACKAGES}


def commit() -> str:
    named = os.environ.get("CODETTA_COMMIT") or output("git", "rev-parse", "--verify", "HEAD")
    changed = output("git", "status", "--porcelain", "--untracked-files=no", "--", "src")
    return named + ("+changes" if changed else "") if named else "unknown"


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


# -------------------------------------------------------------------------------------- files
def write_json(file: Path, record: Any) -> None:
    """Write atomically: a run that is cut off leaves no half file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(file)


def lines(rows: Iterable[Sequence[str]]) -> str:
    """Rows as aligned text, the first column to the left."""
    table = [list(r) for r in rows]
    widths = [max(len(r[i]) for r in table) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(r, widths, strict=True))
        )
        for r in table
    )
