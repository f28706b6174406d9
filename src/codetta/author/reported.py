"""The report of a command about one file, from its stages."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from codetta.author.candidate import Candidate
from codetta.author.report import Report, Stage
from codetta.author.surroundings import environment
from codetta.author.task import Task


def reported(
    command: str,
    path: str | Path,
    candidate: Candidate | None,
    task: Task | None,
    stages: Iterable[Stage],
    begun: float,
    seed: int | None = None,
) -> Report:
    """The report.

    Args:
        candidate: None if the file did not trace.
        begun: ``time.monotonic()`` when the command began.
    """
    return Report(
        command=command,
        file=str(path),
        task=task.name if task else "",
        source_sha256=candidate.source_sha256 if candidate else "",
        program_sha256=candidate.program_sha256 if candidate else "",
        program=candidate.program.text if candidate else "",
        seed=seed,
        environment=environment(),
        stages=tuple(stages),
        elapsed_s=round(time.monotonic() - begun, 2),
    )
