"""`codetta programs`: the catalog as a table, or one program with its backward and its cost.

The listing is for people and for agents alike: what is printed is the program itself, in the text
form that parses back, and `--json` gives the same as data.
"""

from __future__ import annotations

import difflib
import json
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from codetta.language import Program
from codetta.language.traffic import Traffic, traffic
from codetta.language.types import NUMERIC
from codetta.language.vjp import Backward, vjp
from codetta.programs import Entry, catalog

_SIZE = 4096


def programs_command(
    name: Annotated[str | None, typer.Argument(help="Print this program.")] = None,
    m: Annotated[int, typer.Option(help="Rows M, for the cost.")] = _SIZE,
    n: Annotated[int, typer.Option(help="Columns N of the accumulator.")] = _SIZE,
    k: Annotated[int, typer.Option(help="Inner size K.")] = _SIZE,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the ready programs, or print one: formula, text, derived backward, cost."""
    if name is None:
        if as_json:
            typer.echo(json.dumps([_summary(e) for e in _everything().values()], indent=2))
        else:
            Console().print(_table())
        return
    entry = _find(name)
    granule = entry.program.granule
    if n % granule:
        raise typer.BadParameter(f"N must be a multiple of {granule} for {name}", param_hint="--n")
    cost = traffic(entry.program, m, n, k)
    if as_json:
        typer.echo(json.dumps(_details(entry, cost), indent=2))
    else:
        _print(Console(), entry, cost, f"{m} x {n}" + f" x {k}" * entry.program.has_acc)


def _everything() -> dict[str, Entry]:
    """The catalog, and after it what has been promoted, as ``recorded("TASK")``."""
    from codetta.author.registry import entries

    return dict(catalog()) | {e.name: e for e in entries()}


def _find(name: str) -> Entry:
    if name in catalog():
        return catalog()[name]
    known = _everything()
    for written in (name, f'recorded("{name}")'):
        if written in known:
            return known[written]
    close = difflib.get_close_matches(name, known, n=3) or [n for n in known if name in n]
    hint = f"; did you mean {', '.join(close)}?" if close else "; `codetta programs` lists them"
    raise typer.BadParameter(f"there is no program {name!r}{hint}", param_hint="NAME")


def backward_of(program: Program) -> Backward:
    """The derivative with respect to the accumulator and all floating-point operands."""
    floating = [o.name for o in program.operands if o.kind in NUMERIC]
    return vjp(program, ["acc"] * program.has_acc + floating)


# --------------------------------------------------------------------------------- tables
def _table() -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("name", style="cyan", no_wrap=True)
    table.add_column("formula")
    family = ""
    for entry in _everything().values():
        if entry.family != family:
            family = entry.family
            table.add_row("", "")
            table.add_row(Text(family, style="bold magenta"), "")
        table.add_row(f"  {entry.name}", Text(entry.formula))
    table.add_row("", "")
    table.caption = "codetta programs NAME prints one: its text, derived backward and cost."
    table.caption_justify = "left"
    return table


def _print(console: Console, entry: Entry, cost: Traffic, size: str) -> None:
    def section(title: str, *body: RenderableType) -> None:
        console.print()
        console.print(Text(title, style="bold magenta"))
        for part in body:  # program text is not wrapped, so that it can be copied and parsed
            console.print(part, soft_wrap=isinstance(part, Text))

    console.print(Text.assemble((entry.name, "bold cyan"), "  ", entry.formula))
    console.print(Text(entry.doc))
    if entry.source:
        console.print(Text(entry.source, style="dim"))
    section(
        "call",
        _indented(f"codetta.programs.{entry.call}"),
        _indented(entry.program.signature),
    )
    section("program", _indented(str(entry.program)))
    if entry.has_backward:
        backward = backward_of(entry.program)
        section("derived backward", _indented(str(backward)), *_remarks(backward))
    section(f"cost at {size}, bf16, tile 128 x 128", Padding(_cost_table(cost), (0, 0, 0, 2)))


def _indented(text: str, style: str = "") -> Text:
    return Text("\n".join(f"  {line}" for line in text.splitlines()), style=style)


def _remarks(backward: Backward) -> list[Text]:
    remarks = []
    if backward.saved:
        remarks.append(_indented(f"saved by the forward: {', '.join(backward.saved)}", "dim"))
    if backward.zero:
        remarks.append(_indented(f"gradient is zero: {', '.join(backward.zero)}", "dim"))
    return remarks


def _cost_table(cost: Traffic) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for title, parts in (("read", cost.read), ("written", cost.written)):
        detail = ", ".join(f"{name} {_bytes(size)}" for name, size in parts.items())
        table.add_row(title, _bytes(sum(parts.values())), detail)
    if cost.mainloop_flops:
        table.add_row("main loop", _count(cost.mainloop_flops), "operations, 2 M N K")
    table.add_row("program", _count(cost.flops), "operations")
    table.add_row("", _count(cost.special), "special functions (exp, rsqrt, ...)")
    table.add_row("registers", f"{cost.registers:g}", "alive per accumulator element, at most")
    return table


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def _count(number: float) -> str:
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.3g} {unit}".rstrip()
        number /= 1000
    return f"{number:.3g} T"


# ----------------------------------------------------------------------------------- json
def _summary(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "family": entry.family,
        "formula": entry.formula,
        "doc": entry.doc,
        "source": entry.source,
        "call": entry.call,
        "signature": entry.program.signature,
    }


def _details(entry: Entry, cost: Traffic) -> dict[str, Any]:
    return _summary(entry) | {
        "program": str(entry.program),
        "backward": _backward(backward_of(entry.program)) if entry.has_backward else None,
        "cost": {
            "read": dict(cost.read),
            "written": dict(cost.written),
            "flops": cost.flops,
            "special": cost.special,
            "mainloop_flops": cost.mainloop_flops,
            "registers": cost.registers,
        },
    }


def _backward(backward: Backward) -> dict[str, Any]:
    return {
        "passes": [str(p) for p in backward.passes],
        "saved": list(backward.saved),
        "zero": list(backward.zero),
    }
