"""`codetta bench FILE`: how fast a verified program is, next to what it could be replaced by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from codetta.author.bench import bench_candidate
from codetta.author.report import Report, Stage
from codetta.commands.reports import emit, wrong_use

_ORDER = ("candidate", "plain", "eager", "compile", "recorded", "against")


def bench_command(
    file: Annotated[Path, typer.Argument(help="A candidate: a Python file with one epilogue.")],
    task: Annotated[str | None, typer.Option(help="Task, if the file does not name it.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the data; printed if not given.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another kernel: a file with run(a, b, **operands).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Time a program against the plain GEMM, eager, torch.compile and the best recorded one."""
    with wrong_use(), Console(stderr=True).status("tracing") as status:
        report = bench_candidate(file, task, seed=seed, against=against, progress=status.update)
    emit(report if as_json else tabulated(report, Console()), as_json)


def tabulated(report: Report, console: Console) -> Report:
    """Print a table of times for each size; the report without what the tables say."""
    short = []
    for stage in report.stages:
        if "candidate_ms" in stage.facts:
            console.print(times_table(stage))
            told = {n: v for n, v in stage.facts.items() if not n.startswith(_SHOWN)}
            stage = stage.model_copy(update={"facts": told})
        short.append(stage)
    return report.model_copy(update={"stages": tuple(short)})


_SHOWN = (*(f"{name}_ms" for name in _ORDER), "over_")


def times_table(stage: Stage) -> Table:
    """Contenders with their times and what the candidate takes of them."""
    estimate = stage.verdict == "estimate"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(stage.name)
    table.add_column("ms, estimated" if estimate else "ms", justify="right")
    table.add_column("" if estimate else "95 %")
    table.add_column("candidate takes", justify="right")
    table.add_column("" if estimate else "95 %")
    for name in _ORDER:
        if f"{name}_ms" in stage.facts:
            table.add_row(name, *_cells(stage.facts, f"{name}_ms", "{:.4f}"),
                          *_cells(stage.facts, f"over_{name}", "{:.3f} x"))  # fmt: skip
    return table


def _cells(facts: dict[str, Any], name: str, form: str) -> tuple[str, str]:
    if name not in facts:
        return "", ""
    if f"{name}_low" not in facts:
        return form.format(facts[name]), ""
    plain = form.removesuffix(" x")
    low, high = plain.format(facts[f"{name}_low"]), plain.format(facts[f"{name}_high"])
    return form.format(facts[name]), f"{low} to {high}"
