"""`codetta promote FILE`: record a program once it is verified, for `bench` and for calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from codetta.author.promotion import promotion
from codetta.commands.reports import emit, wrong_use


def promote_command(
    file: Annotated[Path, typer.Argument(help="A candidate: a Python file with one epilogue.")],
    task: Annotated[str | None, typer.Option(help="Task, if the file does not name it.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the verification's draws.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Verify a program in full, time it, and append it to the registry; refuse it otherwise."""
    with wrong_use(), Console(stderr=True).status("tracing") as status:
        report, record = promotion(file, task, seed=seed, progress=status.update)
    if record is not None and not as_json:
        call = f'codetta.programs.recorded("{record.task}")'
        typer.echo(f"recorded {record.program.signature}\n  codetta.gemm(a, b, {call}, ...)\n")
    emit(report, as_json)
