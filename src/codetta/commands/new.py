"""`codetta new`: the tasks as a table, or a file to start from."""

from __future__ import annotations

import json
import os
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from codetta.author.skeleton import annotation, returned, signature, skeleton
from codetta.author.task import Task, find, names
from codetta.commands.reports import wrong_use


def new_command(
    task: Annotated[
        str | None, typer.Argument(help="A task's name, or the path of a task file.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; `-` is stdout. [TASK.py]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the tasks, or one, as JSON.")] = (
        False
    ),
) -> None:
    """List the tasks, or write a file to start from: formula, operands, and what to return."""
    with wrong_use():
        if task is None:
            _list([find(name) for name in names()], as_json)
            return
        found = find(task)
    if as_json:
        typer.echo(json.dumps(_data(found), indent=2))
        return
    path = output or Path(f"{found.name}.py")
    named = _relative(Path(task), path) if task.endswith(".py") else found.name
    if str(path) == "-":
        typer.echo(skeleton(found, named=named), nl=False)
        return
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(skeleton(found, named=named, file=str(path)))
    except FileExistsError:
        hint = "it is left as it is; give another with -o"
        raise typer.BadParameter(f"{path} exists: {hint}", param_hint="-o") from None
    except OSError as error:
        why = f"{path} cannot be written: {error.strerror}"
        raise typer.BadParameter(why, param_hint="-o") from None
    typer.echo(f"Wrote {path}. Fill in {found.name}, then: codetta check {path}")


def _relative(task: Path, file: Path) -> str:
    """How a file refers to a task file: by its path from the file's folder."""
    folder = Path(".") if str(file) == "-" else file.parent
    return Path(os.path.relpath(task, folder)).as_posix()


def _list(tasks: list[Task], as_json: bool) -> None:
    if as_json:
        keys = ("name", "title", "level")
        typer.echo(json.dumps([{k: getattr(t, k) for k in keys} for t in tasks], indent=2))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for level, group in groupby(tasks, lambda t: t.level):
        table.add_row(Text(level, style="bold magenta"), "")
        for t in group:
            table.add_row(f"  {t.name}", Text(t.title))
    table.caption = "codetta new TASK writes a file to start from."
    table.caption_justify = "left"
    Console(highlight=False).print(table)


def _data(t: Task) -> dict[str, Any]:
    return {
        "name": t.name,
        "title": t.title,
        "level": t.level,
        "formula": t.formula,
        "signature": signature(t),
        "returns": returned(t),
        "operands": [
            {"name": o.name, "annotation": annotation(o), "doc": o.doc, "dtype": o.dtype}
            | {"differentiable": o.differentiable}
            for o in t.operands
        ],
        "outputs": [
            {"name": o.name, "kind": o.kind, "width": str(o.width), "doc": o.doc, "dtype": o.dtype}
            for o in t.outputs
        ],
        "constants": dict(t.constants),
        "gradient": t.gradient,
        "granule": t.granule,
        "near": list(t.near),
        "notes": t.notes,
        "correctness": [str(w) for w in t.correctness],
        "benchmark": [str(w) for w in t.benchmark],
        "skeleton": skeleton(t),
    }
