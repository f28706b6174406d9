"""How fast a verified program is, and whether the difference to its rivals is more than noise.

On a GPU all contenders are timed interleaved, in a new random order every round, each launch after
a write that empties the L2 cache, on random data; :mod:`.verdict` judges. The outputs that were
timed are compared with the reference in fp64, on some of their rows. Elsewhere :mod:`.estimate`
says what the cost model expects, and the report says that it is an estimate.

Only a verified program is timed: unless this process has seen it pass, a quick verification comes
first.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from codetta.author import estimate
from codetta.author.candidate import task_of
from codetta.author.check import traced
from codetta.author.contenders import cast_outputs, contenders, named, on_meta
from codetta.author.draws import Inputs, drawn
from codetta.author.judge import judge as judged_tensor
from codetta.author.oracle import outputs
from codetta.author.records import promise
from codetta.author.registry import best
from codetta.author.report import Report, Stage, TensorError, Verdict
from codetta.author.reported import reported
from codetta.author.surroundings import environment, no_gpu
from codetta.author.task import Task, Workload
from codetta.author.verdict import AGAINST, judge
from codetta.explanation.eager import counted
from codetta.explanation.facts import MEMORY
from codetta.language.meaning import FP8
from codetta.language.program import Program
from codetta.tuning.timing import GpuTimer, Measure

ROUNDS = 100
_WARM_ROUNDS = 20  # tens of milliseconds: clocks settle
_SAMPLED_ROWS = 64
_TILE = (128, 128)
_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
#: (promise of the task, hash of the program) that this process has seen pass.
_PASSED: set[tuple[str, str]] = set()

Progress = Callable[[str], None]


def bench_candidate(
    path: str | Path,
    task: str | Task | None = None,
    *,
    seed: int | None = None,
    against: str | Path | None = None,
    progress: Progress = lambda text: None,
) -> Report:
    """Time a candidate at the task's benchmark sizes, or estimate its time where there is no GPU.

    Args:
        task: a name, a path or a Task; the candidate's own by default.
        seed: of the data and of the verification.
        against: a file with another kernel for the task, ``run(a, b, **operands)``; see
            :mod:`codetta.author.sandbox`.

    Raises:
        NoCandidateFile, UnknownTask: there is nothing to time.
    """
    begun = time.monotonic()
    path = Path(path)
    seed = int.from_bytes(os.urandom(4), "big") if seed is None else seed
    trace, candidate = traced(path)
    if candidate is None:
        return reported("bench", path, None, None, [trace], begun, seed)
    asked = task_of(candidate, task)
    stages = [trace, verification(path, asked, candidate.program_sha256, seed, progress)]
    if stages[-1].verdict == "passed":
        foreign, rival = foreign_kernel(against, asked, seed, progress)
        stages += [*foreign, *bench_stages(asked, candidate.program, seed, progress, rival)]
    return reported("bench", path, candidate, asked, stages, begun, seed)


def verification(
    path: Path, task: Task, program_sha256: str, seed: int, progress: Progress
) -> Stage:
    """The outcome of a quick verification, in one stage."""
    if (promise(task), program_sha256) in _PASSED:
        return Stage(name="verify", verdict="passed", facts={"verified": "before, by this process"})
    from codetta.author.verify import verify_candidate

    progress("verifying")
    report = verify_candidate(path, task, seed=seed, quick=True)
    if report.passed and report.program_sha256 == program_sha256:
        passed(task, program_sha256)
        return Stage(name="verify", verdict="passed", facts={"stages": len(report.stages)})
    failed = next((s for s in report.stages if s.verdict == "failed"), None)
    if failed is None:
        return Stage(
            name="verify", verdict="failed", reason="the file changed while it was verified",
            fix="leave it alone while it is timed",
        )  # fmt: skip
    return failed.model_copy(update={"name": f"verify: {failed.name}"})


def passed(task: Task, program_sha256: str) -> None:
    """Remember that a program has been verified for a task."""
    _PASSED.add((promise(task), program_sha256))


def foreign_kernel(
    path: str | Path | None, task: Task, seed: int, progress: Progress
) -> tuple[list[Stage], Mapping[str, Sequence[float]]]:
    """What became of somebody else's kernel, and its times by workload.

    One that is wrong is no rival; that is not held against the candidate.
    """
    if path is None:
        return [], {}
    from codetta.author.sandbox import run_foreign

    progress(f"judging {path}")
    device, rounds = ("cpu", 0) if no_gpu() else ("cuda", ROUNDS)
    sizes = task.correctness if no_gpu() else task.benchmark
    ran = run_foreign(path, task, sizes, seed=seed, device=device, rounds=rounds)
    failed = next((s for s in ran.stages if s.verdict == "failed"), None)
    if failed is not None:
        reason = f"{path} is no rival: {failed.name}: {failed.reason}"
        stage = failed.model_copy(update={"name": AGAINST, "verdict": "skipped", "reason": reason})
        return [stage], {}
    reason = f"right, but not timed: {no_gpu()}" if no_gpu() else ""
    verdict: Verdict = "skipped" if reason else "passed"
    facts = {"file": str(path), "stages": len(ran.stages)}
    return [Stage(name=AGAINST, verdict=verdict, reason=reason, facts=facts)], ran.times_ms


def bench_stages(
    task: Task,
    program: Program,
    seed: int,
    progress: Progress = lambda text: None,
    against: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> list[Stage]:
    """One stage per benchmark size: times on a GPU, else estimates.

    Args:
        against: milliseconds of a foreign kernel by workload.
    """
    reason = no_gpu()
    found = []
    for w in task.benchmark:
        gpu = environment()["gpu"]
        record = best(task, w, gpu=gpu or None)
        recorded = None if record is None else record.program
        if reason or w.dtype not in _DTYPES:
            why = reason or f"{w.dtype} products are not fused"
            found.append(estimated(task, program, w, recorded, why))
        else:
            progress(f"timing at {w}")
            found.append(timed(task, program, w, recorded, seed, against=against.get(str(w), ())))
    return found


# --------------------------------------------------------------------------------------- timed
def timed(
    task: Task,
    program: Program,
    w: Workload,
    recorded: Program | None,
    seed: int,
    *,
    measure: Measure | None = None,
    device: torch.device | None = None,
    rounds: int = ROUNDS,
    against: Sequence[float] = (),
) -> Stage:
    """Times and verdict at one size."""
    device = device or torch.device("cuda", torch.cuda.current_device())
    measure = measure or GpuTimer(device)
    with torch.no_grad():
        a, b, operands = drawn(task, w, seed, device)
        b = b.t().contiguous().t()  # as the weight of an nn.Linear lies in memory
        runs, notes = contenders(task, program, recorded, a, b, operands)
        measure(runs, _WARM_ROUNDS)
        times = measure(runs, rounds)
        got = named(program, runs["candidate"]())
    worst = sampled(task, a, b, operands, got, seed)
    floor = estimate.floor_ms(task, w, estimate.gpu_named(environment()["gpu"]))
    ms = {name: t.ms for name, t in times.items()} | ({AGAINST: against} if against else {})
    judged = judge(ms, floor)
    facts = judged.facts | {f"{name}_note": note for name, note in notes.items()}
    wrong = next((e for e in worst if e.error > e.budget), None)
    if wrong is not None:
        return Stage(
            name=str(w), verdict="failed", facts=facts | {"verdict": "wrong"}, worst=worst,
            reason=f"the outputs that were timed are wrong: {wrong.tensor}",
            fix="a kernel that is wrong at this size only is a bug of codetta: report it",
        )  # fmt: skip
    if judged.verdict == "passed":
        facts = {"words": judged.words} | facts
        return Stage(name=str(w), verdict="passed", facts=facts, worst=worst)
    return Stage(
        name=str(w), verdict=judged.verdict, reason=judged.words, fix=judged.fix, facts=facts,
        worst=worst,
    )  # fmt: skip


def sampled(
    task: Task,
    a: Tensor,
    b: Tensor,
    operands: Mapping[str, Any],
    got: Mapping[str, Tensor],
    seed: int,
) -> tuple[TensorError, ...]:
    """Errors of outputs in some of their rows, by the budget of a verification.

    Sums over all rows are left out: the rows that are looked at do not make them up.
    """
    chosen = random.Random(seed).sample(range(a.shape[0]), min(_SAMPLED_ROWS, a.shape[0]))
    rows = torch.tensor(sorted(chosen), device=a.device)
    by_row = {o.name for o in task.operands if o.kind in ("tile", "col", "index")}
    few: dict[str, Any] = {n: x[rows] if n in by_row else x for n, x in operands.items()}
    for o in task.operands:
        if o.kind == "rotary":
            table, positions = operands[o.name]
            few[o.name] = table, positions[rows]
    bounds = outputs(task, Inputs(a[rows], b, few), seed)
    names = [o.name for o in task.outputs if o.kind in ("tile", "col")]
    found = [judged_tensor(n, _taken(got[n], rows), bounds[n], _TILE).error for n in names]
    return tuple(sorted(found, key=lambda e: -e.ratio))


def _taken(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows; PyTorch's indexing knows no fp8."""
    return x.view(torch.uint8)[rows].view(x.dtype) if x.dtype in FP8 else x[rows]


# ----------------------------------------------------------------------------------- estimated
def estimated(
    task: Task, program: Program, w: Workload, recorded: Program | None, why: str
) -> Stage:
    """What the cost model expects at one size, on an H200."""
    kernel = estimate.fused(program, w)
    times = {
        "candidate": kernel.ms,
        "plain": estimate.plain_ms(w),
        "eager": eager_ms(task, w),
        "compile": estimate.compiled_ms(task, w),
    }
    if recorded is not None and recorded.digest != program.digest:
        times["recorded"] = estimate.fused(recorded, w).ms
    facts: dict[str, Any] = {"gpu": estimate.GPU.name, "floor_ms": estimate.floor_ms(task, w)}
    facts |= {f"{name}_ms": ms for name, ms in times.items()}
    facts |= {f"over_{n}": kernel.ms / ms for n, ms in times.items() if n != "candidate"}
    facts |= {"verdict": "estimate"} | ({"split": kernel.reason} if kernel.reason else {})
    words = f"estimated from the cost model, nothing was timed: {why}"
    return Stage(name=str(w), verdict="estimate", reason=words, facts=facts)


def eager_ms(task: Task, w: Workload) -> float:
    """The plain product, and each further operation of the reference at the bandwidth."""
    a, b, operands = on_meta(task, w)
    kernels = counted(lambda: cast_outputs(task, task.reference(a @ b, **operands), a.dtype))
    moved = [k.bytes for k in kernels if k.kind == MEMORY]
    return estimate.plain_ms(w) + sum(moved) / estimate.GPU.bandwidth * 1e3
