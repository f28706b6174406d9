"""One answer through the tools: check, verify, bench, each only if the one before it passed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from codetta.author import bench, prompt
from codetta.author.check import check_candidate
from codetta.author.profile import profile_candidate
from codetta.author.report import Report, Stage
from codetta.author.task import find
from codetta.author.verify import verify_candidate
from codetta.errors import CandidateError

Outcome = Literal["no code", "check", "verify", "bench", "passed"]


@dataclass(frozen=True)
class Judgement:
    """What the tools say to an answer.

    Attributes:
        outcome: "passed", or what failed.
        feedback: what the model is told.
        reason: in one line; "" if it passed.
        ratio: time over the plain product's, the geometric mean of the task's benchmark sizes.
    """

    outcome: Outcome
    feedback: str
    reason: str = ""
    ratio: float | None = None
    program_sha256: str = ""
    reports: tuple[Report, ...] = ()


def judgement(
    path: Path, task: str, seed: int, goal: float, progress: Callable[[str], None]
) -> Judgement:
    """Judge a file as a solution of a task.

    Args:
        seed: of the verification's and the benchmark's data.
        goal: times the plain product's time; what takes more is profiled, too.
    """
    asked = find(task)
    reports: list[Report] = []
    commands: tuple[tuple[Outcome, Callable[[], Report]], ...] = (
        ("check", lambda: check_candidate(path, task, compile=False, progress=progress)),
        ("verify", lambda: verify_candidate(path, task, seed=seed, progress=progress)),
        ("bench", lambda: bench.bench_candidate(path, task, seed=seed, progress=progress)),
    )
    for name, command in commands:
        try:
            report = command()
        except CandidateError as error:  # such as one that is traced only now and then
            stage = Stage(name="trace", verdict="failed", reason=" ".join(str(error).split()))
            report = Report(command=name, file=str(path), task=asked.name, stages=(stage,))
        reports.append(report)
        if not report.passed:
            return _failed(name, report, reports)
        if name == "verify":
            bench.passed(asked, report.program_sha256)
    ratio = _ratio(reports[-1].stages)
    return Judgement(
        "passed", _told(path, task, reports, ratio, goal, progress), ratio=ratio,
        program_sha256=reports[-1].program_sha256, reports=tuple(reports),
    )  # fmt: skip


def _failed(name: Outcome, report: Report, reports: Sequence[Report]) -> Judgement:
    stage = next((s for s in report.stages if s.verdict == "failed"), None)
    reason = f"{stage.name}: {stage.reason}" if stage else "nothing was done"
    return Judgement(
        name, prompt.wrong(report), " ".join(reason.split()),
        program_sha256=report.program_sha256, reports=tuple(reports),
    )  # fmt: skip


def _told(
    path: Path,
    task: str,
    reports: list[Report],
    ratio: float | None,
    goal: float,
    progress: Callable[[str], None],
) -> str:
    if ratio is None or ratio <= goal:
        return ""
    try:
        profile = profile_candidate(path, task, compile_kernel=False, progress=progress)
    except CandidateError:
        return prompt.slow(reports[-1], None, ratio, goal)
    reports.append(profile)
    return prompt.slow(reports[-2], profile, ratio, goal)


def _ratio(stages: Sequence[Stage]) -> float | None:
    """Of the times in a benchmark's stages, or its estimates."""
    facts = [s.facts for s in stages if "candidate_ms" in s.facts and "plain_ms" in s.facts]
    if not facts:
        return None
    logs = [math.log(float(f["candidate_ms"]) / float(f["plain_ms"])) for f in facts]
    return math.exp(sum(logs) / len(logs))
