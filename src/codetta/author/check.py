"""``codetta check``: what is wrong with a file before anything runs, in seconds.

Stages: trace, contract, layout, gradient, cost, lowering, compile. A file that does not trace has
no program to look at; one whose operands, outputs or layout are not the task's is not looked at
further, because what followed would be about another program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from codetta.author import static
from codetta.author.candidate import Candidate, load_candidate, task_of
from codetta.author.contract import contract
from codetta.author.report import Report, Stage
from codetta.author.surroundings import environment
from codetta.author.task import Task, find
from codetta.errors import (
    CandidateError,
    CandidateRaised,
    NoCandidateFile,
    UnknownTask,
    catalogue,
)

Progress = Callable[[str], None]
_PRINTED = 200  # characters shown of what a file prints
#: What to do about exceptions that are not ours.
_OTHERWISE = (
    "mend that line; the function runs once, on symbols, so only what codetta.language has works"
)
_OTHER = {
    "SyntaxError": "mend the syntax of that line, or of the one before it",
    "Refused": "leave it out: a candidate defines an epilogue and nothing else",
}


def check_candidate(
    path: str | Path,
    task: str | Task | None = None,
    *,
    compile: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Everything that is known about a candidate without running it.

    Args:
        path: of the file.
        task: name, path or Task; the file's own ``TASK`` by default.
        compile: also compile the kernel for sm_90a, 3 to 20 s.
        progress: told what is being done.

    Raises:
        NoCandidateFile: there is no such file.
        UnknownTask: neither the file nor ``task`` names one, or it does not exist.
    """
    started = time.monotonic()
    trace, candidate = traced(path)
    asked = task_of(candidate, task) if candidate is not None else _asked(task)
    stages = [trace]
    if candidate is not None and asked is not None:
        stages += _stages(candidate, asked, compile, progress)
    return Report(
        command="check",
        file=str(path),
        task=asked.name if asked is not None else "",
        source_sha256=candidate.source_sha256 if candidate else "",
        program_sha256=candidate.program_sha256 if candidate else "",
        program=candidate.program.text if candidate else "",
        environment=environment(),
        stages=tuple(stages),
        elapsed_s=round(time.monotonic() - started, 2),
    )


def traced(path: str | Path) -> tuple[Stage, Candidate | None]:
    """The stage of tracing a file, and what came of it.

    Raises:
        NoCandidateFile: there is no such file.
    """
    try:
        candidate = load_candidate(path)
    except (NoCandidateFile, UnknownTask):
        raise
    except CandidateError as error:
        return _untraced(error), None
    facts: dict[str, Any] = {
        "program": candidate.program.signature,
        "nodes": len(candidate.program.nodes),
    }
    if printed := " ".join(candidate.printed.split()):
        facts["printed"] = printed[:_PRINTED]
    return Stage(name="trace", verdict="passed", facts=facts), candidate


def _untraced(error: CandidateError) -> Stage:
    """What was wrong, and what is right: for an error of ours the example from its catalogue."""
    message = str(error).removesuffix(f"\n  at {error.where}")
    path = str(error.fields["path"])
    reason, _, fix = message.removeprefix(f"{path} ").partition(". ")
    facts: dict[str, Any] = {"error": type(error).__name__}
    if isinstance(error, CandidateRaised):  # the author's mistake, not that of reading the file
        kind = str(error.fields["error"])
        reason, facts["error"] = f"{kind}: {error.fields['message']}", kind
        right = next((c.right for c in catalogue() if c.__name__ == kind and c.right), "")
        fix = f"as in this right one:\n{right}" if right else _OTHER.get(kind, _OTHERWISE)
    if error.where:  # file:line: source
        number, _, source = error.where.removeprefix(f"{path}:").partition(": ")
        if number.isdigit():
            reason, facts["line"] = f"line {number}, `{source}`: {reason}", int(number)
    return Stage(name="trace", verdict="failed", reason=reason, fix=fix, facts=facts)


def _asked(task: str | Task | None) -> Task | None:
    """The task of a file that says nothing."""
    if isinstance(task, str):
        return find(task)
    return task


def _stages(
    candidate: Candidate, task: Task, compile: bool, progress: Progress | None
) -> Iterator[Stage]:
    program, workload = candidate.program, task.benchmark[0]
    for found in (contract(program, task), static.layout(program, task)):
        yield found
        if found.verdict == "failed":
            return
    yield static.gradient(program, task)
    yield static.cost(program, task, workload)
    lowering = static.lowering(program, workload)
    yield lowering
    if not compile:
        yield Stage(name="compile", verdict="skipped", reason="left out by --no-compile")
    elif lowering.verdict != "passed":
        yield Stage(name="compile", verdict="skipped", reason="there is no one kernel to compile")
    else:
        yield static.compiling(program, workload, progress)
