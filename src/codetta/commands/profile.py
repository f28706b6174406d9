"""`codetta profile FILE`: what limits a program's kernel, in words, and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from codetta.author.profile import profile_candidate
from codetta.commands.reports import emit, wrong_use


def profile_command(
    file: Annotated[Path, typer.Argument(help="A candidate: a Python file with one epilogue.")],
    task: Annotated[str | None, typer.Option(help="Task, if the file does not name it.")] = None,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the kernel: it tells spills.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Say what limits the kernel: from counters on a GPU, from static facts elsewhere."""
    with wrong_use(), Console(stderr=True).status("tracing") as status:
        report = profile_candidate(file, task, compile_kernel=compile, progress=status.update)
    emit(report, as_json)
