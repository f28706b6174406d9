"""Kernels compiled for a GPU that need not be here, in a process that may die.

The compiler may also crash or hang. So a worker (:mod:`.compile_worker`) compiles one kernel after
the other; it is started when needed, and again after a crash.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("compile_worker.py")
ARCHITECTURES = {"90": "sm_90a", "100": "sm_100a"}
#: The compiler may hang instead of crashing; one kernel takes 2 to 13 s on an idle machine.
PATIENCE_S = 300


@dataclass(frozen=True)
class Job:
    """One kernel to compile.

    Attributes:
        text: of the program; or 'sum24' or 'sum20' and 'first', 'further' or 'last', see
            :mod:`codetta.backends.cuda.short_sum`.
        layout: which of a and b is transposed in memory: 'nt' forward, 'nn' dgrad, 'tn' wgrad.
        config: arguments of a Configuration; None leaves the choice to the backend.
        vectorize: see :func:`codetta.backends.cuda.lowering.lower`.
        dtype_b: of b where it is not a's.
        fp8: how fp8 products accumulate, see :class:`codetta.fp8_accumulation`.
        wide: matrices that the epilogue loads are fp32.
    """

    text: str
    m: int
    n: int
    k: int
    layout: str
    dtype: str = "bfloat16"
    config: tuple[Any, ...] | None = None
    vectorize: bool = True
    dtype_b: str = ""
    fp8: str = "fast"
    wide: bool = False


class Compiler:
    """Kernels for one architecture, compiled one after the other by one worker process.

    Blackwell's compiler packs pairs of fp32 operations, and on some programs that ends the process
    (an error, a segmentation fault or a hang). Such a job is tried again unpacked, which its answer
    says as "packed": False, and only then reported as an error.
    """

    def __init__(
        self, sm: str, folder: Path, worker: Path = WORKER, patience_s: float = PATIENCE_S
    ) -> None:
        self.worker, self.patience_s = worker, patience_s
        self.sm, self.folder = sm, folder
        self.log = folder / "stderr.txt"
        self.process: subprocess.Popen[str] | None = None
        self.starts = 0

    def compile(self, job: Job) -> dict[str, Any]:
        """{"config", "stages", "stores", "loads", "tensor_ops", "target", "packed"} or {"error"}.

        ``stores`` and ``loads`` count the STL and LDL instructions that spilled registers cause.
        """
        found = self._ask(job) | {"packed": job.vectorize}
        if "error" in found and self.sm == "90":
            # After many kernels the compiler fails where a fresh one does not; Hopper has no
            # vectorizer to do without.
            self.close()
            return self._ask(job) | {"packed": job.vectorize, "retried": found["error"]}
        if "error" in found and job.vectorize:
            again = self._ask(replace(job, vectorize=False))
            found = found if "error" in again else again | {"packed": False}
        return found

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()
            self.process = None

    def _ask(self, job: Job) -> dict[str, Any]:
        process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        alarm = threading.Timer(self.patience_s, process.kill)
        alarm.start()
        try:
            process.stdin.write(json.dumps(asdict(job)) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            alarm.cancel()
        if answer:
            found: dict[str, Any] = json.loads(answer)
            return found
        self.close()
        code = process.returncode
        return {"error": f"the compiler died ({code}): {self.log.read_text()[-500:]}"}

    def _start(self) -> subprocess.Popen[str]:
        self.starts += 1
        # An empty cache for each process: a worker that failed may have left the object behind,
        # which the next would then not compile and could not find as new.
        cache = environment(self.sm, str(self.folder / f"cache{self.starts}"))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(self.worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | cache,
                text=True,
            )
        return self.process


def environment(sm: str, cache: str) -> dict[str, str]:
    """What QuACK must find in its environment before it is imported."""
    os.makedirs(cache, exist_ok=True)
    own = {"QUACK_CACHE_DIR": cache, "CODETTA_CACHE_DIR": cache}  # nothing compiled or tuned before
    return {"QUACK_ARCH": sm, "CUTE_DSL_ARCH": ARCHITECTURES[sm], **own}
