"""Several benchmarks on one card at a time, each of whose timings runs alone.

    python benchmarks/alone.py benchmarks/layer.py --out results --shape d4096 &
    python benchmarks/alone.py benchmarks/loss.py --out results &
    python -m pytest -p alone -n 8 tests/backends &          # with benchmarks/ on PYTHONPATH
    wait

Compiling takes longer than timing, and needs no card. So scripts run side by side; a script that
begins to time takes a lock, stops all others that were started like this (SIGSTOP), waits until
what they had launched is done, and lets them go on when it has its times. A script that starts
meanwhile waits. What is measured as it compiles (cold starts, first steps) includes the stops.

CODETTA_ALONE names the folder of the lock; processes with the same folder know of each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import measure

FOLDER = Path(os.environ.get("CODETTA_ALONE") or Path(tempfile.gettempdir()) / "codetta-alone")
SETTLED_S = 0.1  # after which kernels of stopped processes are done
#: Where scripts time, by the end of their names: module, class or None, function.
TIMERS = {
    "author_tasks.py": ("codetta.tuning.timing", "GpuTimer", "__call__"),
    "tune_shapes.py": ("codetta.tuning.timing", "GpuTimer", "__call__"),
    "tune_sustained.py": ("codetta.tuning.timing", "SustainedTimer", "__call__"),
}
_holding = False


def register() -> None:
    """From now on others may stop this process; waits while one of them is timing."""
    (FOLDER / "processes").mkdir(parents=True, exist_ok=True)
    (FOLDER / "processes" / str(os.getpid())).touch()
    with _lock():
        pass


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Run while all registered processes but this one stand still."""
    global _holding
    if _holding:
        yield
        return
    with _lock():
        _holding = True
        measure.synchronize()
        stopped = [pid for pid in _others() if _send(pid, signal.SIGSTOP)]
        time.sleep(SETTLED_S)
        try:
            yield
            measure.synchronize()
        finally:
            for pid in stopped:
                _send(pid, signal.SIGCONT)
            _holding = False


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    # Released when the process ends, however that happens; it may leave others stopped then, and
    # the next timing lets them go on.
    with open(FOLDER / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _others() -> list[int]:
    found = []
    for entry in (FOLDER / "processes").iterdir():
        pid = int(entry.name)
        if pid == os.getpid():
            continue
        if _send(pid, signal.SIGCONT):
            found.append(pid)
        else:
            entry.unlink(missing_ok=True)
    return found


def _send(pid: int, what: signal.Signals) -> bool:
    try:
        os.kill(pid, what)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def timing(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, run alone."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with alone():
            return function(*args, **kwargs)

    return run


def pytest_configure(config: Any) -> None:
    """As a plugin: tests are stopped while others time."""
    register()


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    script, sys.argv = sys.argv[1], sys.argv[1:]
    register()
    measure.interleaved = timing(measure.interleaved)
    for ending, (module, owner, name) in TIMERS.items():
        if script.endswith(ending):
            __import__(module)
            timer = getattr(sys.modules[module], owner)
            setattr(timer, name, timing(getattr(timer, name)))
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
