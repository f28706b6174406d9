"""`codetta mcp`: the author tools for coding agents, over stdin and stdout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from codetta.author.mcp import server
from codetta.commands.reports import wrong_use


def mcp_command(
    task: Annotated[
        list[Path] | None,
        typer.Option(help="A task file of your own to serve beside the library's; repeatable."),
    ] = None,
) -> None:
    """Serve the author tools over the Model Context Protocol, on stdin and stdout.

    A client starts this command; nothing else may read or write its stdin and stdout.
    """
    with wrong_use():
        app = server(task or ())
    app.run("stdio")
