"""An Explanation for a terminal."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from codetta.explanation.facts import (
    BACKWARD,
    GEMM,
    KINDS,
    MEMORY,
    PHASES,
    Explanation,
    KernelFact,
    LeftFact,
    RegionFact,
    total,
)
from codetta.explanation.units import amount, duration, times

WIDTH = 100
_KIND = {"gemm": "GEMM", "memory": "memory-bound", "attention": "attention"}


def plain(found: Explanation) -> str:
    """The summary without colours."""
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, color_system=None, force_terminal=False)
    console.print(summary(found))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def summary(found: Explanation) -> RenderableType:
    """One screen: totals, regions, what is left and why."""
    parts: list[RenderableType] = [Text(heading(found), style="bold"), Text("")]
    parts += [_totals(found), Text("")]
    if found.regions:
        parts += [_regions(found), Text("")]
    else:
        parts += [Text("No region: nothing of this model becomes a GEMM with an epilogue.\n")]
    parts += [_left(found)]
    parts += [Text(f"\n{note}") for note in found.notes]
    return Group(*parts)


def heading(found: Explanation) -> str:
    """What was explained, in one line."""
    parts = [found.model]
    if found.layers:
        traced = found.traced_layers
        parts.append(
            f"{found.layers} layers"
            + (f" (traced with {traced}, the rest alike)" if traced else "")
        )
    parts += [f"{found.tokens} tokens", found.dtype] if found.regions else []
    parts.append("forward and backward" if found.training else "forward")
    parts += [f"{found.graphs} graphs"] if found.graphs > 1 else []
    return f"{parts[0]}: {', '.join(parts[1:])}"


def _table(*columns: str) -> Table:
    """The first column is text, the others are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, c in enumerate(columns):
        table.add_column(c, justify="right" if i else "left", no_wrap=bool(i))
    return table


def _totals(found: Explanation) -> Table:
    table = _table("before → after", "kernels", "bytes", f"at least, on {found.gpu.name}")
    for phase in phases(found):
        for kind in KINDS:
            if any(found.total(w, phase, kind).kernels for w in ("before", "after")):
                table.add_row(f"{phase} {_KIND[kind]}", *_numbers(found, phase, kind))
    table.add_row("total", *_numbers(found, None, None), style="bold")
    before, after = (found.total(w) for w in ("before", "after"))
    table.add_row(
        "", times(before.kernels, after.kernels), times(before.bytes, after.bytes),
        times(before.seconds, after.seconds), style="green",
    )  # fmt: skip
    return table


def _numbers(found: Explanation, phase: str | None, kind: str | None) -> list[str]:
    before, after = (found.total(w, phase, kind) for w in ("before", "after"))
    return [
        f"{before.kernels} → {after.kernels}",
        f"{amount(before.bytes)} → {amount(after.bytes)}",
        f"{duration(before.seconds)} → {duration(after.seconds)}",
    ]


def _regions(found: Explanation) -> Table:
    table = _table("region", "times", "GEMMs", "memory-bound", "bytes")
    for region in found.regions:
        pairs = [
            [total(((k, 1) for k in kernels), found.gpu, None, kind) for kind in (GEMM, MEMORY)]
            for kernels in (region.before, region.after)
        ]
        moved = [sum(k.bytes for k in kernels) for kernels in (region.before, region.after)]
        table.add_row(
            region.label,
            str(region.count),
            f"{pairs[0][0].kernels} → {pairs[1][0].kernels}",
            f"{pairs[0][1].kernels} → {pairs[1][1].kernels}",
            f"{amount(moved[0])} → {amount(moved[1])}",
        )
    return table


def shown_left(found: Explanation) -> list[LeftFact]:
    """What was left and runs kernels, the most bytes first."""
    running = [x for x in found.left if x.kernels]
    return sorted(running, key=lambda x: -x.count * sum(k.bytes for k in x.kernels))


_SHOWN = 8


def _left(found: Explanation) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("left alone", "times", "bytes"):
        table.add_column(name, justify="left" if name == "left alone" else "right", no_wrap=True)
    table.add_column("because")
    shown = shown_left(found)
    for x in shown[:_SHOWN]:
        moved = amount(x.count * sum(k.bytes for k in x.kernels))
        table.add_row(x.what, str(x.count), moved, x.reason)
    if len(shown) > _SHOWN:
        rest = sum(x.count * sum(k.bytes for k in x.kernels) for x in shown[_SHOWN:])
        table.add_row(f"{len(shown) - _SHOWN} more", "", amount(rest), "in the details")
    return table


# ---------------------------------------------------------------------------------- details
def details(found: Explanation) -> str:
    """Every kernel with its formulas, and everything that was left."""
    lines: list[str] = []
    for region in found.regions:
        lines += [*_region(found, region), ""]
    lines.append("left alone")
    for x in found.left:
        size = amount(x.count * sum(k.bytes for k in x.kernels)) if x.kernels else "no kernel"
        lines.append(f"  {x.count} {x.what} in {x.where or 'the model'}, {size}: {x.reason}")
    return "\n".join(lines)


def _region(found: Explanation, region: RegionFact) -> Iterator[str]:
    often = f", {region.count} times" if region.count > 1 else ""
    yield f"{region.label}{often}"
    fused = ", ".join(f"{n} {name}" for name, n in region.operations)
    yield from _wrapped("  in place of ", fused)
    for phase in PHASES:
        kernels = [k for k in region.after if k.phase == phase]
        if kernels:
            yield f"  {phase}"
        for k in kernels:
            yield from kernel_lines(k, duration(k.seconds(found.gpu)))


def kernel_lines(k: KernelFact, time: str) -> Iterator[str]:
    """A kernel: what it is, what it writes, what it computes."""
    size = " × ".join(map(str, k.size)) if k.size else ""
    first = " ".join(p for p in (k.role, size, k.heading) if p)
    yield f"    {first}  ({amount(k.bytes)}, {time})"
    for name, formula in k.formulas:
        yield from _wrapped("      ", f"{name} = {formula}" if name else formula)


def _wrapped(first: str, text: str) -> Sequence[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=" " * 8, break_long_words=False
    )


def phases(found: Explanation) -> tuple[str, ...]:
    """Those that were counted."""
    return PHASES if found.training else tuple(p for p in PHASES if p != BACKWARD)
