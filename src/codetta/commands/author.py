"""`codetta author TASK --model M`: a language model writes the epilogue, the tools judge it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from codetta.author.candidate import clean
from codetta.author.loop import Limits, begin, run
from codetta.author.trace import Event, Trace
from codetta.commands.reports import wrong_use
from codetta.errors import NoEndpoint, TraceUnusable

_STOPS = {
    "fast": "it is as fast as asked for",
    "verified": "it is verified",
    "converged": "the last rounds gained nothing",
    "stuck": "the model repeats itself",
    "rounds": "all rounds are used",
    "budget": "the time is up",
    "timeout": "the model did not answer in time",
    "endpoint": "the model can no longer be reached",
}


def author_command(
    task: Annotated[
        str | None, typer.Argument(help="A task's name, or the path of a task file.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model, as the endpoint knows it.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Answers at most.")] = Limits.rounds,
    budget_s: Annotated[float, typer.Option(help="Seconds for everything.")] = Limits.budget_s,
    timeout_s: Annotated[float, typer.Option(help="Seconds for one answer.")] = Limits.timeout_s,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer at most. [the endpoint's limit]")
    ] = None,
    until: Annotated[
        Literal["fast", "verified"],
        typer.Option(help="Stop at 1.08 x the plain product, or when verified."),
    ] = "fast",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the trace. [author-TASK, or -2, -3, ...]")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the trace in this folder.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of all data; printed if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Have a model write an epilogue: answer, check, verify, bench, report, and again.

    The endpoint is any that speaks OpenAI's chat protocol: OPENAI_BASE_URL and OPENAI_API_KEY.
    """
    from codetta.author.client import Model, endpoint

    console = Console(stderr=as_json, highlight=False)
    with wrong_use(NoEndpoint, TraceUnusable):
        where = endpoint()
        trace = _trace(task, model, out, resume, where.shown, seed)
    start = trace.start
    console.print(
        f"[bold]codetta author[/] {start['task']}  model {start['model']}  "
        f"[dim]{where.shown}  seed {start['seed']}  {trace.folder}[/]",
        soft_wrap=True,
    )
    limits = Limits(rounds, budget_s, max_tokens, timeout_s, until)
    with Console(stderr=True).status("starting") as status:
        summary = run(
            Model(where, start["model"]), trace, limits,
            seen=lambda event: console.print(_line(event)), progress=status.update,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        _print(console, summary)
    raise typer.Exit(0 if summary["best"] else 1)


def _trace(
    task: str | None,
    model: str | None,
    out: Path | None,
    resume: Path | None,
    url: str,
    seed: int | None,
) -> Trace:
    if resume is not None:
        if task or model or out or seed is not None:
            why = "the trace says task, model, folder and seed: give --resume without them"
            raise typer.BadParameter(why, param_hint="--resume")
        return Trace.resume(resume)
    if task is None or model is None:
        missing = "TASK" if task is None else "--model"
        raise typer.BadParameter("is needed to begin", param_hint=missing)
    seed = int.from_bytes(os.urandom(4), "big") if seed is None else seed
    return begin(out or _free(f"author-{Path(task).stem}"), task, model, url, seed)


def _free(name: str) -> Path:
    """The first folder of that name that is not there yet."""
    folder, number = Path(name), 1
    while folder.exists():
        number += 1
        folder = Path(f"{name}-{number}")
    return folder


def _line(event: Event) -> Text:
    """An event, for a person."""
    head = f"round {event['round']}  "
    if event["kind"] == "no_answer":
        return Text.assemble(head, ("no answer  ", "bold red"), clean(event["reason"], 300))
    outcome, took = event["outcome"], f"  {event['elapsed_s']:.1f} s"
    if outcome == "passed":
        ratio = event["ratio"]
        said = f"{ratio:.3f} x the plain product" if ratio is not None else ""
        return Text.assemble(head, ("verified  ", "bold green"), said, (took, "dim"))
    word = "no code  " if outcome == "no code" else f"failed {outcome}  "
    return Text.assemble(head, (word, "bold red"), clean(event["reason"], 300), (took, "dim"))


def _print(console: Console, summary: dict[str, Any]) -> None:
    tokens = ", ".join(f"{n} {c}" for n, c in summary["tokens"].items())
    notes = f"{summary['rounds']} rounds; {summary['elapsed_s']} s"
    notes += f"; tokens: {tokens}" if tokens else ""
    best = summary["best"]
    said, style = ("VERIFIED", "bold green") if best else ("NOT SOLVED", "bold red")
    console.print(
        Text.assemble((said, style), f": {_STOPS[summary['stop']]}", (f"  {notes}", "dim"))
    )
    if best:
        console.print(f"best: round {best['round']}, {best['file']}", soft_wrap=True)
        console.print(f"keep it: codetta promote {best['file']}", soft_wrap=True)
