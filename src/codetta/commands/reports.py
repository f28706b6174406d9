"""What the author commands share: a report is printed and becomes the exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console

from codetta.author.render import render
from codetta.author.report import Report
from codetta.errors import CodettaError, NoCandidateFile, UnknownTask


def emit(report: Report, as_json: bool) -> NoReturn:
    """Print a report for a person or as JSON, and exit: 0 if it passed, 1 if not."""
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        Console(highlight=False).print(render(report))
    raise typer.Exit(report.exit_status)


@contextmanager
def wrong_use(*more: type[CodettaError]) -> Iterator[None]:
    """A file or a task that does not exist is a wrong use of the command: exit status 2.

    Args:
        more: errors that are one, too.
    """
    wrong: tuple[type[CodettaError], ...] = (NoCandidateFile, UnknownTask, *more)
    try:
        yield
    except wrong as error:
        typer.echo(f"codetta: {error}", err=True)
        raise typer.Exit(2) from None
