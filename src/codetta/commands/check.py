"""`codetta check FILE`: what is wrong with an epilogue before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from codetta.author.check import check_candidate
from codetta.commands.reports import emit, wrong_use


def check_command(
    file: Annotated[Path, typer.Argument(help="A candidate: a Python file with one epilogue.")],
    task: Annotated[str | None, typer.Option(help="Task, if the file does not name it.")] = None,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the kernel for sm_90a.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check an epilogue without running it: trace, contract, layout, gradient, cost, lowering."""
    with wrong_use(), Console(stderr=True).status("tracing") as status:
        report = check_candidate(file, task, compile=compile, progress=status.update)
    emit(report, as_json)
