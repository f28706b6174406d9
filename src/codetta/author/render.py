"""A Report on one screen: what failed, where, what to do; then the rest, as far as it fits.

Failures are shown whole. If all facts make more than :data:`LINES` lines, those of stages that
did not fail are cut to one line each, then left out: the JSON form has everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from codetta.author.report import Report, Stage, TensorError, Where

LINES = 40
_STYLES = {
    "passed": "green", "failed": "bold red", "skipped": "yellow", "noise": "yellow",
    "warning": "yellow",
    "estimate": "cyan",
}  # fmt: skip
_WORST = 3
_ENVIRONMENT = ("backend", "device", "gpu")  # shown of the report's


def render(report: Report) -> RenderableType:
    """For ``rich.console.Console().print``; at most :data:`LINES` lines at any width from 60 up."""
    return _Screen(report)


class _Screen:
    """Knows the width only when it is printed, and chooses how much to say."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head, foot = _head(self.report), verdict(self.report)
        room = LINES - sum(len(console.render_lines(x, options)) for x in (head, foot))
        lines: list[list[Segment]] = []
        for detail in (2, 1, 0):
            lines = console.render_lines(_table(self.report, detail), options, pad=False)
            if len(lines) <= room:
                break
        left = len(lines) - room
        yield head
        for line in lines if left <= 0 else lines[: room - 1]:
            yield from line
            yield Segment.line()
        if left > 0:
            yield Text(f"... and {left + 1} lines more; --json has everything", style="dim")
        yield foot


def verdict(report: Report) -> Text:
    """The last line: how it ended, in words."""
    names: dict[str, list[str]] = {}
    for stage in report.stages:
        names.setdefault(stage.verdict, []).append(stage.name)
    style = "bold green"
    if not report.stages:
        said, style = "NOTHING WAS DONE", "bold red"
    elif "failed" in names:
        said, style = f"FAILED: {', '.join(names['failed'])}", "bold red"
    elif "noise" in names:
        said, style = f"UNDECIDED: {', '.join(names['noise'])} within the noise", "bold yellow"
    elif "passed" not in names:
        said, style = f"NOT MEASURED: {', '.join(names)}", "bold yellow"
    else:
        said = "PASSED"
    notes = [f"{_number(report.elapsed_s)} s"]
    if "warning" in names:
        notes.append(f"warnings: {', '.join(names['warning'])}")
    if "estimate" in names and "passed" in names:
        notes.append(f"estimated, not measured: {', '.join(names['estimate'])}")
    if "skipped" in names:
        notes.append(f"skipped: {', '.join(names['skipped'])}")
    if report.seed is not None:
        notes.append(f"seed {report.seed}")
    if report.program_sha256:
        notes.append(f"program {report.program_sha256[:12]}")
    return Text.assemble((said, style), (f"  {'; '.join(notes)}", "dim"))


def _head(report: Report) -> Text:
    task = f"  task {report.task}" if report.task else ""
    where = ", ".join(report.environment[k] for k in _ENVIRONMENT if report.environment.get(k))
    return Text.assemble(
        (f"codetta {report.command}", "bold"), f" {report.file}", task, (f"  {where}", "dim")
    )


# ------------------------------------------------------------------------------- stages
def _table(report: Report, detail: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for stage in report.stages if detail else _merged(report.stages):
        word = stage.verdict.upper() if stage.verdict == "failed" else stage.verdict
        body = list(_body(stage, detail))
        first, rest = (body[0], body[1:]) if body else (Text(), [])
        table.add_row(Text(word, style=_STYLES[stage.verdict]), Text(stage.name), first)
        for line in rest:
            table.add_row("", "", line)
    return table


def _merged(stages: Iterable[Stage]) -> Iterator[Stage]:
    """Stages, those that passed one after the other as one."""
    for quiet, group in groupby(stages, lambda s: s.verdict == "passed" and not s.reason):
        run = list(group)
        if quiet and len(run) > 1:
            reason = ", ".join(s.name for s in run)
            yield Stage(name=f"{len(run)} stages", verdict="passed", reason=reason)
        else:
            yield from run


def _body(stage: Stage, detail: int) -> Iterator[RenderableType]:
    failed = stage.verdict == "failed"
    if stage.reason:
        yield _cut(Text(stage.reason, style="red" if failed else ""), detail == 0 and not failed)
    if stage.where is not None:
        yield _labelled("first", _first(stage.where))
    for error in stage.worst[:_WORST] if failed or detail == 2 else ():
        yield _labelled("worst" if failed else "error", _error(error))
    if stage.fix:
        yield _labelled("fix", stage.fix)
    if stage.replay:
        yield _labelled("again", stage.replay)
    if stage.facts and (failed or detail):
        facts = {name.replace("_", " "): value for name, value in stage.facts.items()}
        text = Text("; ".join(_facts(facts)), style="dim" if stage.reason else "")
        yield _cut(text, detail < 2)


def _cut(text: Text, short: bool) -> Text:
    """The text, on one line if it is to be short."""
    if short:
        text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _labelled(label: str, text: str) -> Text:
    return Text.assemble((f"{label}: ", "bold"), text)


def _first(w: Where) -> str:
    at, tile = (", ".join(map(str, x)) for x in (w.index, w.tile))
    there = f" (tile {tile})" if tile else ""
    return f"{w.tensor}[{at}]{there} is {_number(w.got)}, expected {_number(w.expected)}"


def _error(e: TensorError) -> str:
    return f"{e.tensor} {_number(e.ratio)} x its budget ({_number(e.error)} of {_number(e.budget)})"


# -------------------------------------------------------------------------------- facts
def _facts(facts: Mapping[str, Any]) -> Iterator[str]:
    for name, value in facts.items():
        said = _said(value)
        yield f"{name} {said}" if said else name


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, Mapping):
        return ", ".join(_facts(value))
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(_said(v) for v in value)
    return str(value)


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"
