"""Why a program takes as long as it does: counters where there is a GPU, static facts elsewhere.

On a GPU, ``ncu`` profiles one launch of the program's kernel in a process of its own, and one of
the plain product beside it. Without a GPU, or without permission to read counters, what is known
before a kernel runs has to do: its registers that spill and its pipeline's stages, from compiling
it, and bytes, arithmetic and tiles from its text. :mod:`.diagnosis` puts either into words.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from codetta.author import counters
from codetta.author.candidate import task_of
from codetta.author.check import traced
from codetta.author.diagnosis import diagnose
from codetta.author.estimate import OPERAND, fused, plain_bytes, plain_ms
from codetta.author.kernelfacts import Facts
from codetta.author.report import Report, Stage, Verdict
from codetta.author.reported import reported
from codetta.author.static import compiling
from codetta.author.surroundings import no_gpu
from codetta.author.task import Task, Workload
from codetta.backends.cuda.config_cache import canonical
from codetta.language.program import Program
from codetta.language.traffic import traffic
from codetta.language.types import Kind
from codetta.tuning.space import DTYPES, Problem

_NCU_LIMIT_S = 240.0
#: From a kernel to ncu's CSV about it, or about its plain product.
Counted = Callable[[Problem, bool], str]


def profile_candidate(
    path: str | Path,
    task: str | Task | None = None,
    *,
    workload: Workload | None = None,
    compile_kernel: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Diagnose the kernel of a candidate at one workload, by default the task's first.

    Args:
        compile_kernel: False leaves out what only compiling tells: spills.

    Raises:
        NoCandidateFile, UnknownTask: there is nothing to profile.
    """
    begun = time.monotonic()
    trace, candidate = traced(path)
    if candidate is None:
        return reported("profile", path, None, None, [trace], begun)
    asked = task_of(candidate, task)
    w = workload or asked.benchmark[0]
    program = candidate.program
    facts, static = static_stage(program, w, compile_kernel, progress)
    facts, measured = counter_stage(facts, program, asked, w, progress)
    stages = (trace, static, measured, *diagnosis_stages(facts))
    return reported("profile", path, candidate, asked, stages, begun)


# ------------------------------------------------------------------------------- static facts
def static_stage(
    program: Program,
    w: Workload,
    compile_kernel: bool,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[Facts, Stage]:
    """What is known before the kernel runs."""
    kernel = fused(program, w)
    cost, config = kernel.traffic, kernel.config
    elements = w.m * w.n
    facts = Facts(
        bytes_by_name=epilogue_bytes(program, w),
        plain_bytes=plain_bytes(w),
        split=kernel.reason,
        registers=cost.registers,
        flops=cost.flops / elements,
        special=cost.special / elements,
        product_ops=2 * w.k,
        expected=kernel.ms / plain_ms(w),
    )
    reason = kernel.reason
    if config is not None:
        tiles = -(-w.m // config.tile_m) * -(-w.n // config.tile_n)
        facts = replace(facts, config=str(config), stages=kernel.stages, tiles=tiles)
        if compile_kernel:
            made = compiling(program, w, progress)
            if "spills" in made.facts:
                facts = replace(facts, stages=made.facts["ab_stages"], spills=made.facts["spills"])
            else:
                reason = f"not compiled: {made.reason}"
    known: dict[str, Any] = {"workload": str(w), "estimate_over_plain": round(facts.expected, 3)}
    verdict: Verdict = "estimate" if facts.spills is None else "passed"
    return facts, Stage(name="static", verdict=verdict, reason=reason, facts=known | _told(facts))


def _told(f: Facts) -> dict[str, Any]:
    """Static facts, flat."""
    found: dict[str, Any] = {"kernels": 2 if f.split else 1}
    if f.config:
        found |= {"configuration": f.config, "stages": f.stages, "tiles": f.tiles,
                  "wave_filled": round(f.filled, 3)}  # fmt: skip
    if f.spills is not None:
        found["spills"] = f.spills
    found |= {
        "registers_per_element": f.registers, "flops_per_element": f.flops,
        "special_per_element": f.special,
    }  # fmt: skip
    moved = {"a @ b": f.plain_bytes, **f.bytes_by_name}
    return found | {"MiB": {name: round(size / 2**20, 2) for name, size in moved.items()}}


def problem_of(program: Program, task: Task, w: Workload) -> Problem | None:
    """The kernel as tuning knows it, or None where an array has a dtype that tuning does not."""
    short = {str(d).removeprefix("torch."): name for name, d in DTYPES.items()}
    usual = Problem(canonical(program), w.m, w.n, w.k, "nt", OPERAND[w.dtype])
    given = {o.name: o.dtype for o in task.operands}
    names = [n for o in program.operands for n in [o.name] * (1 + (o.kind is Kind.ROTARY))]
    dtypes = [
        usual_one if not given.get(name) else short.get(given[name], "")
        for name, usual_one in zip(names, usual.flat_dtypes, strict=True)
    ]
    if usual.operand not in DTYPES or "" in dtypes:
        return None
    return replace(usual, dtypes=tuple(dtypes))


def epilogue_bytes(program: Program, w: Workload) -> dict[str, int]:
    """Bytes by operand and output, beyond what the plain product moves."""
    cost = traffic(program, w.m, w.n, w.k)
    found = {n: size for n, size in cost.read.items() if n not in ("a", "b")}
    free = w.m * w.n * 2  # the plain product's own store
    for name, size in cost.written.items():
        found[name] = found.get(name, 0) + max(size - free, 0)
        free = max(free - size, 0)
    return {n: size for n, size in found.items() if size}


# ----------------------------------------------------------------------------------- counters
def counter_stage(
    facts: Facts,
    program: Program,
    task: Task,
    w: Workload,
    progress: Callable[[str], None] = lambda text: None,
    count: Counted | None = None,
) -> tuple[Facts, Stage]:
    """Counters of the kernel and of its plain product, by ``ncu``."""
    if count is None:
        reason = no_gpu() or ("" if counters.find_ncu() else "ncu is not on PATH")
        if reason:
            fix = "run it on a Hopper GPU with Nsight Compute for measured limits"
            return facts, Stage(name="counters", verdict="skipped", reason=reason, fix=fix)
    problem, found = problem_of(program, task, w), []
    for which in ("fused", "plain"):
        progress(f"ncu on the {which} kernel")
        try:
            if problem is None:
                raise ValueError("arrays of such dtypes are not profiled")
            found.append(counters.parse((count or _counted)(problem, which == "plain")))
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[-300:]
            fix = "reading counters may need root, or the driver's option NVreg_RestrictProfiling"
            return facts, Stage(name="counters", verdict="skipped", reason=reason, fix=fix)
    facts = replace(facts, counters=found[0], plain=found[1])
    told: dict[str, Any] = {"kernel": found[0]["kernel"][:60]}
    for name in counters.METRICS:
        if name in found[0]:
            told |= {name: found[0][name]}
            told |= {f"{name} of a @ b": found[1][name]} if name in found[1] else {}
    told |= {f"waits_for_{n}": x for n, x in _largest(found[0]["stalls"])}
    return facts, Stage(name="counters", verdict="passed", facts=told)


def _largest(stalls: dict[str, float], count: int = 3) -> list[tuple[str, float]]:
    return sorted(stalls.items(), key=lambda x: -x[1])[:count]


def _counted(problem: Problem, plain: bool) -> str:
    p = problem
    given = {"program": p.program.text, "m": p.m, "n": p.n, "k": p.k, "plain": plain,
             "operand": p.operand, "dtypes": list(p.dtypes)}  # fmt: skip
    command = [sys.executable, "-m", "codetta.author.profiled"]
    return counters.run_ncu(command, _NCU_LIMIT_S, given=json.dumps(given))


# ---------------------------------------------------------------------------------- diagnosis
def diagnosis_stages(facts: Facts) -> tuple[Stage, ...]:
    """One stage per finding, the limit first. They are advice, so none of them fails."""
    verdict: Verdict = "passed" if facts.counters else "estimate"
    return tuple(
        Stage(name=f"{'also' if i else 'limit'}: {f.limit}", verdict=verdict,
              reason=f.words, fix=f.change)
        for i, f in enumerate(diagnose(facts))
    )  # fmt: skip
