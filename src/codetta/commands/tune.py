"""`codetta tune`: search tile configurations on this GPU and keep the winners for later calls."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from codetta.backends.cuda.available import unavailable
from codetta.commands.programs import _find
from codetta.errors import BackendUnavailable
from codetta.tuning.layer import layer_problems
from codetta.tuning.space import Problem
from codetta.tuning.tune import Tuned, tuned


def tune_command(
    name: Annotated[str | None, typer.Argument(help="A ready program; see `programs`.")] = None,
    m: Annotated[int, typer.Option(help="Rows M (tokens).", min=1)] = 16384,
    n: Annotated[int, typer.Option(help="Columns N of the accumulator.", min=1)] = 4096,
    k: Annotated[int, typer.Option(help="Inner size K.", min=1)] = 4096,
    layout: Annotated[str, typer.Option(help="Contiguous axes of a and b: nt, nn, tn.")] = "nt",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    d: Annotated[int | None, typer.Option(help="Hidden size: tune a decoder layer.")] = None,
    f: Annotated[int | None, typer.Option(help="MLP width of the layer.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads of the layer.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key-value heads of the layer.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds.", min=1)] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure tile configurations of one program, or of the GEMMs of a decoder layer."""
    if (name is None) == (d is None):
        raise typer.BadParameter("give the name of a program, or a layer by --d --f --heads")
    problems = (
        _layer(m, d, f, heads, kv_heads, dtype) if d else [_named(name, m, n, k, layout, dtype)]
    )
    problem = unavailable()
    if problem is not None:
        raise BackendUnavailable(given="cuda", reason=problem[0], fix=problem[1])
    found = _with_progress(problems, budget, quiet=as_json)
    if as_json:
        typer.echo(json.dumps([_data(t) for t in found], indent=2))
    else:
        _print(Console(), found, len(problems))


def _named(name: str | None, m: int, n: int, k: int, layout: str, dtype: str) -> Problem:
    entry = _find(name or "")
    if layout not in ("nt", "nn", "tn", "tt"):
        raise typer.BadParameter("nt, nn, tn or tt", param_hint="--layout")
    _check_dtype(dtype)
    if not entry.program.has_acc:
        raise typer.BadParameter(f"{name} has no GEMM", param_hint="NAME")
    if n % entry.program.granule:
        raise typer.BadParameter(f"N is a multiple of {entry.program.granule}", param_hint="--n")
    return Problem(entry.program, m, n, k, layout, dtype)


def _layer(
    tokens: int, d: int, f: int | None, heads: int | None, kv_heads: int | None, dtype: str
) -> list[Problem]:
    _check_dtype(dtype)
    if f is None or heads is None or d % heads:
        raise typer.BadParameter("a layer needs --f, and --heads that divide --d")
    named = layer_problems(tokens, d, f, heads, kv_heads or heads, dtype)
    return sorted(dict.fromkeys(named.values()), key=lambda p: -p.m * p.n * p.k)


def _check_dtype(dtype: str) -> None:
    if dtype not in ("bf16", "fp16"):
        raise typer.BadParameter("bf16 or fp16", param_hint="--dtype")


def _with_progress(problems: list[Problem], budget: float, quiet: bool) -> tuple[Tuned, ...]:
    columns = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True) as bar:
        task = bar.add_task("starting the compilers", total=1.0)

        def show(text: str, share: float) -> None:
            bar.update(task, description=text, completed=share)

        return tuned(problems, budget, show)


def _print(console: Console, found: tuple[Tuned, ...], asked: int) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("M x N x K", "", "default", "ms", "best", "ms", "cuBLAS a @ b"):
        table.add_column(title, justify="right" if title in ("ms", "cuBLAS a @ b") else "left")
    for t in found:
        p = t.problem
        before = "" if t.default_ms is None else f"{t.default_ms:.4f}"
        table.add_row(f"{p.m} x {p.n} x {p.k}", p.layout, str(t.default), before, str(t.config),
                      f"{t.ms:.4f}", f"{t.plain_ms:.4f}")  # fmt: skip
    console.print(table)
    if len(found) < asked:
        console.print(f"{asked - len(found)} of {asked} kernels were not reached: raise --budget.")
    for t in found:
        where = t.file or "this process alone: the cache cannot be written"
        console.print(f"\n{t.problem.name}\n  kept in {where}\n  {t.code}", soft_wrap=True)


def _data(t: Tuned) -> dict[str, Any]:
    p = t.problem
    return {
        "program": p.program.text, "m": p.m, "n": p.n, "k": p.k, "layout": p.layout,
        "dtype": p.operand, "config": t.config.data(), "ms": t.ms, "default": t.default.data(),
        "default_ms": t.default_ms, "plain_ms": t.plain_ms, "tried": t.tried, "code": t.code,
    }  # fmt: skip
