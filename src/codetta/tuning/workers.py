"""Kernels compiled in parallel, by processes that never touch the GPU.

A worker (``python -m codetta.tuning.workers CACHE``) reads one job per line and answers with one
line: the A/B stages of the kernel and its spilled registers. Object files go into QuACK's cache,
where the process that measures finds them. A worker that dies costs its job and is replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from torch import Tensor

import codetta
from codetta.backends.cuda.configs import Configuration
from codetta.backends.cuda.lowering import lower
from codetta.language.program import Program
from codetta.tuning.space import Problem, arrays, unit

_ARCHITECTURE = {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a", "CUDA_VISIBLE_DEVICES": ""}


class Work(Protocol):
    """One kernel to compile."""

    @property
    def config(self) -> Configuration:
        """Its configuration."""

    @property
    def key(self) -> str:
        """What tells it from others, for the record of its statics."""

    def data(self) -> dict[str, Any]:
        """As plain data, for the way to a worker."""

    def call(self) -> tuple[Program, Tensor, Tensor, list[Tensor]]:
        """A call that the kernel serves: program, a, b and operands, without memory."""


@dataclass(frozen=True)
class Job:
    """One kernel: the problem's shape only counts for what is ragged."""

    problem: Problem
    config: Configuration

    def data(self) -> dict[str, Any]:
        p, (m, n, k) = self.problem, self.small
        return {
            "program": p.program.text, "m": m, "n": n, "k": k, "layout": p.layout,
            "operand": p.operand, "dtypes": list(p.flat_dtypes), "config": self.config.data(),
        }  # fmt: skip

    @property
    def small(self) -> tuple[int, int, int]:
        """A small shape that the same kernel serves, with ragged edges where they matter."""
        p, c = self.problem, self.config
        over = {sink.over for sink in lower(p.program, p.operand).sinks}
        columns = math.lcm(c.tile_n, 512)  # whole heads of any usual size
        m = 4 * c.tile_m - 8 * ("m" in over and p.m % c.tile_m > 0)
        n = columns - unit(p.program) * ("n" in over and p.n % c.tile_n > 0)
        return m, n, 512

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.data(), sort_keys=True).encode()).hexdigest()[:24]

    def call(self) -> tuple[Program, Tensor, Tensor, list[Tensor]]:
        return self.problem.program, *arrays(self.problem, "meta")

    @staticmethod
    def of(data: dict[str, Any]) -> Job:
        config = Configuration.of(data["config"], "tuning")
        assert config is not None
        program = Program.parse(data["program"])
        m, n, k = data["m"], data["n"], data["k"]
        dtypes = tuple(data["dtypes"])
        return Job(Problem(program, m, n, k, data["layout"], data["operand"], dtypes), config)


@dataclass(frozen=True)
class Statics:
    """What is known about a kernel before it runs; ``error`` says why there is none."""

    stages: int = 0
    spills: int = 0
    seconds: float = 0.0
    error: str = ""


def compile_all(
    jobs: Sequence[Work],
    cache: Path,
    *,
    workers: int = 0,
    done: Callable[[int, int], None] = lambda count, total: None,
    deadline: Callable[[], bool] = lambda: False,
) -> dict[str, Statics]:
    """Statics by job key; jobs answered before are not compiled again.

    Args:
        cache: QuACK's cache folder (``QUACK_CACHE_DIR``).
        workers: processes; as many as there are usable cores by default.
        done: called with the number of finished jobs and of all.
        deadline: when it says True, jobs not begun stay undone and are missing in the answer.
    """
    found: dict[str, Statics] = {}
    queue: SimpleQueue[Work] = SimpleQueue()
    waiting = {}
    for key, job in {job.key: job for job in jobs}.items():
        known = _read(_record(cache, key))
        if known is None:
            waiting[key] = job
            queue.put(job)
        else:
            found[key] = known
    total = len(found) + len(waiting)
    lock = threading.Lock()

    def serve() -> None:
        worker: _Worker | None = None
        while not deadline():
            try:
                job = queue.get_nowait()
            except Empty:
                break
            worker = worker if worker is not None and worker.alive() else _Worker(cache)
            statics = worker.ask(job)
            with lock:
                found[job.key] = statics
                done(len(found), total)
        if worker is not None:
            worker.close()

    count = min(workers or len(_cores()), len(waiting))
    threads = [threading.Thread(target=serve, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _cores() -> list[int]:
    usable = getattr(os, "sched_getaffinity", None)
    return sorted(usable(0)) if usable else list(range(os.cpu_count() or 1))


def _record(cache: Path, key: str) -> Path:
    return cache / "codetta_statics" / f"{key}.json"


def _read(file: Path) -> Statics | None:
    try:
        return Statics(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


class _Worker:
    """A process that compiles, started when it is first needed."""

    def __init__(self, cache: Path) -> None:
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115
        source = str(Path(codetta.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "codetta.tuning.workers", str(cache)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            env=os.environ | _ARCHITECTURE | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )

    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, job: Work) -> Statics:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(job.data()) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
            return Statics(**json.loads(answer))
        except (OSError, ValueError, TypeError):
            self.close()
            self.stderr.seek(0)
            tail = self.stderr.read()[-300:].decode(errors="replace").strip()
            return Statics(error=f"the compiler died: {tail}")

    def close(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()


# ---------------------------------------------------------------------------- in the worker
class _Compiler:
    """Compiles into a folder of its own, and moves object files into the cache when they are done.

    The same kernel can be asked for twice, by shapes whose edges turn out not to matter.
    """

    def __init__(self, cache: Path) -> None:
        from codetta.backends.cuda import quack

        self.cache, self.own = cache, cache / f"worker-{os.getpid()}"
        self.own.mkdir(parents=True, exist_ok=True)
        self.stages = quack.compile_without_gpu(str(self.own))
        self.made: dict[tuple[str, Configuration], Statics] = {}

    def answer(self, job: Work) -> Statics:
        try:
            statics = self.compiled(job)
        except Exception as error:
            statics = Statics(error=f"{type(error).__name__}: {str(error)[:300]}")
        record = _record(self.cache, job.key)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(asdict(statics)))
        return statics

    def compiled(self, job: Work) -> Statics:
        from codetta.backends.cuda.assembly import describe
        from codetta.tuning.statics import spills

        begun = time.monotonic()
        program, a, b, operands = job.call()
        call = describe(program, a, b, operands, config=job.config)
        identity = call.lowered.source, job.config
        for made in self.own.rglob("*.o"):
            count = spills(made)
            target = self.cache / made.relative_to(self.own)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(made, target)
            took = round(time.monotonic() - begun, 2)
            self.made[identity] = Statics(self.stages[-1][0], count, took)
        return self.made[identity]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    compiler = _Compiler(Path(sys.argv[1]))
    from codetta.tuning.calls import work

    try:
        for line in sys.stdin:
            print(json.dumps(asdict(compiler.answer(work(json.loads(line))))), file=answers)
            answers.flush()
    finally:
        shutil.rmtree(compiler.own, ignore_errors=True)


if __name__ == "__main__":
    main()
