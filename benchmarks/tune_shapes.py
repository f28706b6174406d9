"""Search the configurations of a decoder layer's GEMM kernels, and write the shipped defaults.

    python benchmarks/tune_shapes.py --out results --budget 480      # all shapes, resumed
    python benchmarks/tune_shapes.py --out results --shape d2048
    python benchmarks/tune_shapes.py --out results --write-defaults  # from the JSON, no GPU needed

Per layer shape: every GEMM kernel of the decoder's middle segment, forward and backward. Per
kernel: all legal configurations, compiled in parallel, those with heavy spills dropped, the others
timed interleaved on random data, a few repetitions for all and many for the fastest; beside them
cuBLAS and the best configuration of the plain product on the same mainloop. One JSON file per
shape, in which finished kernels are kept. ``--dry-run`` compiles for real and makes the times up.

A kernel that hangs or faults takes the process with it (exit status 17): the next run leaves it
out and goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("QUACK_COMPILE_WORKERS", str(len(os.sched_getaffinity(0))))

import torch
from layer_model import SHAPES, TOKENS, Shape
from measure import environment, write_json

from codetta.backends.cuda import shipped
from codetta.backends.cuda.assembly import describe
from codetta.backends.cuda.config_cache import canonical
from codetta.backends.cuda.configs import Configuration, family
from codetta.backends.cuda.lowering import lower
from codetta.language import epilogue, store
from codetta.tuning.layer import fewer_heads, layer_problems
from codetta.tuning.search import Found, search
from codetta.tuning.space import Problem, arrays, configurations
from codetta.tuning.timing import GpuTimer, Measure, Times
from codetta.tuning.workers import Job, Statics, compile_all

HUNG = 17  # exit status
PATIENCE = 45.0  # seconds for a kernel's first launch, loading or compiling included
COMPILING = 0.45  # share of the budget after which no further kernel is compiled


@epilogue
def plain(acc):
    """a @ b, rounded once."""
    return store(acc, "operand")


# ---------------------------------------------------------------------------------- problems
def problems(s: Shape, tokens: int) -> dict[str, Problem]:
    """GEMM kernels of a layer by name, in the order in which they run."""
    found = layer_problems(tokens, s.d, s.f, s.heads, s.kv_heads)
    return {name: fewer_heads(p) for name, p in found.items()}


def plain_problem(p: Problem) -> Problem:
    return Problem(canonical(plain), p.m, p.n, p.k, p.layout, p.operand)


# ------------------------------------------------------------------------------------- sweep
class Guard:
    """Remembers in a file which kernel runs for the first time, and gives up on it in the end."""

    def __init__(self, file: Path) -> None:
        self.file, self.since, self.problem = file, 0.0, ""
        self.suspects = set(file.read_text().splitlines()) if file.exists() else set()
        threading.Thread(target=self.watch, daemon=True).start()

    def key(self, config: Configuration) -> str:
        return f"{self.problem} | {config}"

    def __call__(self, config: Configuration, run: Callable[[], Any]) -> Any:
        key = self.key(config)
        if key in self.suspects:
            raise RuntimeError("hung or faulted before")
        self.file.write_text("\n".join([*sorted(self.suspects), key]) + "\n")
        self.since = time.monotonic()
        try:
            return run()
        except RuntimeError as error:
            if "CUDA error" in str(error) or "illegal" in str(error):
                self.give_up(f"{key}: {str(error)[:200]}")
            raise
        finally:
            self.since = 0.0
            self.file.write_text("".join(f"{s}\n" for s in sorted(self.suspects)))

    def watch(self) -> None:
        while True:
            time.sleep(1.0)
            if self.since and time.monotonic() - self.since > PATIENCE:
                self.give_up("a kernel hangs")

    def give_up(self, why: str) -> None:
        print(f"giving up: {why}", flush=True)
        os._exit(HUNG)


class Sweep:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begun = args, time.monotonic()
        self.device = torch.device("meta" if args.dry_run else "cuda")
        self.measure: Measure = made_up if args.dry_run else GpuTimer(self.device)
        self.environment = environment()
        self.guard = Guard(args.out / "tune_suspects.txt")
        self.statics: dict[str, Statics] = {}
        self.plain: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def late(self, share: float = 1.0) -> bool:
        return time.monotonic() - self.begun > self.args.budget * share

    def run(self, shapes: list[Shape]) -> bool:
        """Whether everything was measured."""
        work = [(s, self.file(s), problems(s, self.args.tokens)) for s in shapes]
        todo = [
            (s, name, p)
            for s, file, found in work
            for name, p in found.items()
            if name not in done(file)
        ]
        self.compile([p for _, _, p in todo])
        complete = True
        for shape, name, problem in todo:
            if self.late():
                complete = False
                break
            try:
                record = self.kernel(name, problem)
            except Exception as error:  # out of memory, say: the others still count
                complete = False
                self.say(f"{shape.name} {name}: {type(error).__name__}: {str(error)[:300]}")
                continue
            if record is None:
                complete = False
                continue
            file = self.file(shape)
            kernels = done(file) | {name: record}
            write_json(file, {"shape": shape.name, "tokens": self.args.tokens,
                              "environment": self.environment, "kernels": kernels})  # fmt: skip
            self.say(f"{shape.name:10}{line(record)}")
        return complete

    def file(self, shape: Shape) -> Path:
        return self.args.out / f"tune_{shape.name}_{self.args.tokens}.json"

    def compile(self, todo: list[Problem]) -> None:
        every = [q for p in todo for q in (p, plain_problem(p))]
        jobs = {j.key: j for q in every for j in self.jobs(q)}

        def progress(count: int, total: int) -> None:
            if count % 20 == 0 or count == total:
                self.say(f"compiled {count} of {total}")

        self.statics = compile_all(
            list(jobs.values()), self.args.cache, workers=self.args.workers, done=progress,
            deadline=lambda: self.late(COMPILING),
        )  # fmt: skip
        bad = [s.error for s in self.statics.values() if s.error]
        self.say(f"{len(self.statics)} kernels, {len(bad)} failed {sorted(set(bad))[:3]}")
        known = [
            j for j in jobs.values() if j.key in self.statics and not self.statics[j.key].error
        ]
        if known and not self.args.dry_run:
            for job in (known[0], known[-1]):  # the first one pays for imports
                begun = time.monotonic()
                with contextlib.suppress(Exception):  # noted later, with its kernel
                    self.described(job)
            if time.monotonic() - begun > 3.0:
                self.say("the workers' kernels are no hits: once more, in QuACK's pool")
                self.compile_in_pool(known)

    def described(self, job: Job) -> None:
        """Load a kernel, or compile it."""
        p = replace(job.problem, m=1024, n=4096, k=512)
        describe(p.program, *arrays(p, self.device), config=job.config)

    def compile_in_pool(self, jobs: list[Job]) -> None:
        from quack.cache.async_compile import CompilePending, pool_scope

        queue = deque(jobs)
        waiting = 0  # jobs in a row that found their kernel still compiling
        with pool_scope():
            while queue and not self.late(COMPILING + 0.2):
                job = queue.popleft()
                try:
                    self.described(job)
                    waiting = 0
                except CompilePending:
                    queue.append(job)
                    waiting += 1
                except Exception as error:
                    self.say(f"{job.config}: {type(error).__name__}: {str(error)[:200]}")
                if waiting > len(queue):
                    waiting = 0
                    time.sleep(0.3)
        for job in queue:  # not ready in time
            del self.statics[job.key]

    def jobs(self, problem: Problem) -> list[Job]:
        configs = configurations(lower(problem.program, problem.operand))
        return [Job(problem, c) for c in configs[: self.args.limit]]

    def kernel(self, name: str, problem: Problem) -> dict[str, Any] | None:
        given = arrays(problem, self.device)
        self.guard.problem = problem.program.digest[:12] + " " + problem.layout
        a, b, _ = given
        found = self.search(problem, given, {"cublas": lambda: a @ b})
        if found.best is None or found.best.times is None:
            return None
        best = found.best
        key = (problem.m, problem.n, problem.k, problem.layout)
        if problem.program.text == plain_problem(problem).program.text:
            self.plain[key] = round(best.times.median, 5), best.config.data()
        elif key not in self.plain:
            self.guard.problem = "plain " + problem.layout
            other = self.search(plain_problem(problem), (a, b, []), {})
            if other.best is not None and other.best.times is not None:
                self.plain[key] = round(other.best.times.median, 5), other.best.config.data()
        cublas = found.others["cublas"]
        alone = self.plain.get(key, (None, None))
        return {
            "name": name, "family": family(lower(problem.program, problem.operand)),
            "program": problem.program.text, "digest": problem.program.digest,
            "m": problem.m, "n": problem.n, "k": problem.k, "layout": problem.layout,
            "operand": problem.operand,
            "best": best.data(), "cublas_ms": round(cublas.median, 5),
            "cublas_min_ms": round(cublas.best, 5),
            "quack_plain_ms": alone[0], "quack_plain_config": alone[1],
            "ratio_to_plain": round(best.times.median / min(cublas.median, alone[0] or 1e9), 4),
            "ratio_to_cublas": round(best.times.median / cublas.median, 4),
            "candidates": [c.data() for c in found.candidates],
        }  # fmt: skip

    def search(
        self, problem: Problem, given: Any, others: Mapping[str, Callable[[], Any]]
    ) -> Found:
        configs = [
            (j.config, self.statics[j.key]) for j in self.jobs(problem) if j.key in self.statics
        ]
        estimate = 2 * problem.m * problem.n * problem.k / 0.7e12  # ms at 700 TFLOP/s
        return search(
            problem, given, configs, self.measure, others=others, late=self.late, guard=self.guard,
            quick=int(min(max(60 / estimate, 3), 6)), final=int(min(max(400 / estimate, 10), 25)),
        )  # fmt: skip

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.begun:6.1f} s  {text}", flush=True)


def made_up(runs: Mapping[str, Callable[[], Any]], count: int) -> dict[str, Times]:
    """Times without a GPU, for ``--dry-run``."""
    return {n: Times([1 + random.Random(f"{n} {i}").random() for i in range(count)]) for n in runs}


def done(file: Path) -> dict[str, Any]:
    try:
        kernels: dict[str, Any] = json.loads(file.read_text())["kernels"]
        return kernels
    except (OSError, ValueError, KeyError):
        return {}


def line(record: dict[str, Any]) -> str:
    best = record["best"]
    c = best["config"]
    kind = "pp" if c["pingpong"] else "coop"
    size = f"{record['m']}x{record['n']}x{record['k']} {record['layout']}"
    text = f"{c['tile_m']}x{c['tile_n']} {kind} {c['cluster_m']}x{c['cluster_n']}"
    return (
        f"{record['family']:34}{size:24}{best['median_ms']:9.4f} ms  {text} s{c['max_swizzle']}"
        f"{' epi16' if c['epi_n'] else ''} stages {best['stages']} spills {best['spills']}  "
        f"cuBLAS {record['cublas_ms']:.4f}  plain {record['quack_plain_ms'] or 0:.4f}  "
        f"ratio {record['ratio_to_plain']:.3f}"
    )


# ---------------------------------------------------------------------------------- defaults
def write_defaults(out: Path, target: Path) -> None:
    """The winners as the data file of the package."""
    records = []
    for file in sorted(out.glob("tune_*.json")):
        data = json.loads(file.read_text())
        if data["environment"].get("dry_run"):
            raise SystemExit(f"{file} holds made-up times")
        for record in data["kernels"].values():
            records.append((data["environment"], record))
    target.write_text(shipped.dumps(records))
    print(f"{target}: {len(records)} kernels")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", action="append", choices=[s.name for s in SHAPES])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds")
    parser.add_argument("--workers", type=int, default=0, help="compile processes")
    parser.add_argument("--cache", type=Path, help="of object files; QUACK_CACHE_DIR by default")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--limit", type=int, help="configurations per kernel")
    parser.add_argument("--write-defaults", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.write_defaults:
        write_defaults(args.out, shipped.FILE)
        return
    folder = args.cache or os.environ.get("QUACK_CACHE_DIR") or tempfile.mkdtemp(prefix="quack")
    args.cache = Path(folder).resolve()
    args.cache.mkdir(parents=True, exist_ok=True)
    os.environ["QUACK_CACHE_DIR"] = str(args.cache)
    if args.dry_run:
        os.environ |= {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a"}
        from codetta.backends.cuda import quack

        quack.compile_without_gpu(str(args.cache))
    sweep = Sweep(args)
    if args.dry_run:
        sweep.environment = {**sweep.environment, "dry_run": "yes"}
    shapes = [s for s in SHAPES if not args.shape or s.name in args.shape]
    with torch.no_grad():
        complete = sweep.run(shapes)
    sweep.say("complete" if complete else "not complete: run it again to go on")
    sys.exit(0)


if __name__ == "__main__":
    main()
