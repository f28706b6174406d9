"""From a file to a record: verify exactly this source, time it, append."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from codetta.author import bench
from codetta.author.candidate import Candidate, task_of
from codetta.author.check import traced
from codetta.author.records import Record, Timing, append, promise
from codetta.author.report import Report, Stage
from codetta.author.reported import reported
from codetta.author.surroundings import environment
from codetta.author.task import Task
from codetta.author.verify import verify_candidate
from codetta.errors import RegistryNotWritable

Progress = Callable[[str], None]


def promotion(
    path: str | Path,
    task: str | Task | None = None,
    *,
    seed: int | None = None,
    progress: Progress = lambda text: None,
) -> tuple[Report, Record | None]:
    """Verify a candidate in full, time it, and record it if it passed.

    Slowness does not keep a program out: a record says what it is. A time that cannot be believed
    does, and so does a source that is not the one that was verified.

    Returns:
        The report, whose last stage "record" says what was written, and the record; None if it was
        refused, and then the stage that failed says why.

    Raises:
        NoCandidateFile, UnknownTask: there is nothing to promote.
    """
    begun = time.monotonic()
    path = Path(path)
    seed = int.from_bytes(os.urandom(4), "big") if seed is None else seed
    trace, candidate = traced(path)
    if candidate is None:
        return reported("promote", path, None, None, [trace], begun, seed), None
    asked = task_of(candidate, task)
    progress("verifying")
    verified = verify_candidate(path, asked, seed=seed)
    stages = [*verified.stages, _same(candidate, verified)]
    record = None
    if verified.passed and stages[-1].verdict == "passed":
        bench.passed(asked, candidate.program_sha256)
        timed = [_kept(s) for s in bench.bench_stages(asked, candidate.program, seed, progress)]
        stages += timed
        if all(t.facts.get("verdict") in _RECORDED for t in timed):
            made = _record(candidate, asked, verified, timed, seed)
            stage, written = _written(made)
            stages.append(stage)
            record = made if written else None
    return reported("promote", path, candidate, asked, stages, begun, seed), record


#: A slower program is recorded with its time, a wrong or implausible one is not.
_RECORDED = ("faster", "slower", "noise", "estimate")


def _kept(timed: Stage) -> Stage:
    slow = timed.facts.get("verdict") == "slower"
    return timed.model_copy(update={"verdict": "warning"}) if slow else timed


def _same(candidate: Candidate, verified: Report) -> Stage:
    """Whether what was verified is what the file says before and after."""
    try:
        now = hashlib.sha256(candidate.path.read_bytes()).hexdigest()
    except OSError:
        now = ""
    sources = {candidate.source_sha256, verified.source_sha256, now}
    programs = {candidate.program_sha256, verified.program_sha256}
    if len(sources) == len(programs) == 1:
        return Stage(name="same source", verdict="passed")
    return Stage(
        name="same source", verdict="failed", reason="the file changed while it was verified",
        fix="leave it alone and promote it again",
    )  # fmt: skip


def _record(
    candidate: Candidate, task: Task, verified: Report, timed: Sequence[Stage], seed: int
) -> Record:
    gpu = environment()["gpu"]
    worst: dict[str, tuple[float, float]] = {}
    for error in (e for s in verified.stages for e in s.worst):
        name = error.tensor.partition(" in ")[0]  # "y in fuzz/3"
        known = worst.get(name)
        if known is None or error.ratio > known[0] / (known[1] or 1.0):
            worst[name] = error.error, error.budget
    timings = tuple(
        Timing(
            w.m, w.n, w.k, w.dtype, gpu if s.verdict != "estimate" else "",
            float(s.facts["candidate_ms"]), float(s.facts["plain_ms"]),
        )
        for w, s in zip(task.benchmark, timed, strict=True)
    )  # fmt: skip
    return Record(
        task=task.name, task_sha256=promise(task), source_sha256=candidate.source_sha256,
        program_sha256=candidate.program_sha256, text=candidate.program.text, errors=worst,
        timings=timings, environment=environment(), seed=seed,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )  # fmt: skip


def _written(record: Record) -> tuple[Stage, bool]:
    try:
        file = append(record)
    except RegistryNotWritable as error:
        fix = "set CODETTA_REGISTRY to a file that can be written"
        return Stage(name="record", verdict="failed", reason=str(error), fix=fix), False
    facts: dict[str, Any] = {"file": str(file), "date": record.date, "task": record.task}
    facts |= {"program": record.program_sha256[:12], "tensors": len(record.errors)}
    return Stage(name="record", verdict="passed", facts=facts), True
