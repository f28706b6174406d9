"""`codetta verify`: run a candidate against its task's oracle, on whatever may come."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from codetta.author.verify import verify_candidate
from codetta.commands.reports import emit, wrong_use
from codetta.errors import BackendUnavailable, UnknownBackend, UnknownCase


def verify_command(
    file: Annotated[Path, typer.Argument(help="A file with one epilogue; see `codetta new`.")],
    task: Annotated[str | None, typer.Option(help="Its task, if the file binds no TASK.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of all data and sizes; random.")] = None,
    case: Annotated[str | None, typer.Option(help="Only this case; a failure names its.")] = None,
    backend: Annotated[str, typer.Option(help="auto, reference or cuda.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A third of the cases.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a candidate against its task's oracle in fp64, on inputs of every size and kind."""
    console = Console(stderr=True)
    with wrong_use(), console.status("tracing") as status:
        try:
            report = verify_candidate(
                file,
                task,
                seed=seed,
                backend=backend,
                case=case,
                quick=quick,
                progress=status.update,
            )
        except (BackendUnavailable, UnknownBackend, UnknownCase) as error:
            typer.echo(f"codetta: {error}", err=True)
            raise typer.Exit(2) from None
    emit(report, as_json)
