"""What the demo prints, 80 columns wide."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from codetta.demo.judge import Gradient
from codetta.demo.kernels import ATTENTION, GEMM, LAYERS, MEMORY, PROGRAMS, CostRow, sums
from codetta.demo.record import KernelSide, Result
from codetta.demo.train import Run

WIDTH = 80


# ----------------------------------------------------------------------------------- printing
def print_result(console: Console, result: Result) -> None:
    console.print(loss_table(result))
    console.print(gradient_table(result.gradients))
    console.print(kernel_table(result.kernels))
    console.print(change_table(result.kernels))
    console.print(speed_table(result.runs))
    if all(run.peak_bytes is None for run in result.runs):
        console.print(
            "[dim]On a CPU, CODA runs its reference backend, which is the specification of the "
            "fused kernels and not their speed. Time and peak memory mean something on a GPU.[/]"
        )
    console.print()
    print_verdict(console, result)


def print_verdict(console: Console, result: Result) -> None:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for criterion in result.criteria:
        mark = "[bold green]PASS[/]" if criterion.passed else "[bold red]FAIL[/]"
        grid.add_row(mark, f"[bold]{criterion.name}[/]", escape(criterion.detail))
    console.print(grid)


def loss_table(result: Result) -> Table:
    table = _table("Loss per step", "step", *(run.name for run in result.runs), "off by", "allowed")
    for row in result.losses:
        style = "" if row.passed else "bold red"
        table.add_row(
            str(row.step),
            *(f"{run.losses[row.step - 1]:.6f}" for run in result.runs),
            f"{row.deviation:.1e}",
            f"{row.allowed:.1e}",
            style=style,
        )
    table.caption = f"off by: {result.deviation}"
    return table


def gradient_table(gradients: Sequence[Gradient]) -> Table:
    """The worst of each group: the parameters of all layers that share a name."""
    groups: dict[str, list[Gradient]] = {}
    for gradient in gradients:
        groups.setdefault(_without_path(gradient.name), []).append(gradient)
    table = _table("Gradient error at step 1", "parameter", "tensors", "stock", "CODA", "of budget")
    for name, group in groups.items():
        used = max((g.used if math.isfinite(g.used) else math.inf) for g in group)
        table.add_row(
            name,
            str(len(group)),
            f"{max(_relative(g.stock_error, g.norm) for g in group):.1e}",
            f"{max(_relative(g.codetta_error, g.norm) for g in group):.1e}",
            f"{used:.0%}" if math.isfinite(used) else "over",
            style="" if all(g.passed for g in group) else "bold red",
        )
    table.caption = "largest ‖g − g64‖ / ‖g64‖ of the group, g64 from a run in fp64"
    return table


def kernel_table(sides: Sequence[KernelSide]) -> Table:
    headings = [f"{side.name}\n{how}" for side in sides for how in ("watched", "computed")]
    table = _table("Kernels of a step, forward + backward", "", *headings)
    columns = [sums(rows) for side in sides for rows in (side.inside, side.computed)]
    for kind, label in (
        (GEMM, "GEMMs"),
        (MEMORY, "memory-bound kernels"),
        (ATTENTION, "attention kernels"),
    ):
        known = [i % 2 == 0 or kind != ATTENTION or c[kind].kernels for i, c in enumerate(columns)]
        shown = list(zip(columns, known, strict=True))
        table.add_row(label, *(f"{c[kind].kernels:,}" if k else "-" for c, k in shown))
        table.add_row("  bytes moved", *(_amount(c[kind].bytes) if k else "-" for c, k in shown))
    rest = [side.rest for side in sides]
    table.add_section()
    for kind, label in ((GEMM, "rest: GEMMs"), (MEMORY, "rest: memory-bound")):
        table.add_row(label, *(x for r in rest for x in (f"{r[kind].kernels:,}", "-")))
        table.add_row("  bytes moved", *(x for r in rest for x in (_amount(r[kind].bytes), "-")))
    table.caption = "\n".join(
        (
            "watched: every operation of step 1; computed: from formulas alone",
            f"above the line, {'; '.join(f'{side.name}: {_WHAT[side.region]}' for side in sides)}",
            "rest: the rest of the step, watched only",
        )
    )
    return table


_WHAT = {LAYERS: "the decoder layers", PROGRAMS: "codetta's programs, and attention"}


def speed_table(runs: Sequence[Run]) -> Table:
    table = _table("Time and memory", "run", "s per step", "peak memory")
    for run in runs:
        peak = "-" if run.peak_bytes is None else f"{run.peak_bytes / 2**30:.2f} GiB"
        table.add_row(run.name, f"{run.seconds_per_step:.3f}", peak)
    return table


def change_table(sides: Sequence[KernelSide]) -> Table:
    """Stock against CODA: kernels and bytes of GEMMs and memory-bound kernels, attention apart."""
    before, after = sides
    table = _table("Before and after", "", "stock", "CODA", "CODA / stock")
    old, new = sums(before.inside), sums(after.inside)
    for kind, label in ((GEMM, "GEMMs"), (MEMORY, "memory-bound kernels")):
        kernels = (old[kind].kernels, new[kind].kernels)
        table.add_row(label, *(f"{count:,}" for count in kernels), _ratio(*kernels))
    batch, seq = before.real_step_tokens
    for label, moved in (
        ("bytes, this run (watched)", (_bytes(before.inside), _bytes(after.inside))),
        (
            f"bytes, {batch} × {seq} tokens (computed)",
            (_bytes(before.real_step), _bytes(after.real_step)),
        ),
    ):
        table.add_row(label, *map(_amount, moved), _ratio(*moved))
    whole = [sums(r for rows in side.watched.values() for r in rows) for side in sides]
    for label, counts in (
        ("whole step: GEMMs", [w[GEMM].kernels for w in whole]),
        ("whole step: memory-bound kernels", [w[MEMORY].kernels for w in whole]),
    ):
        table.add_row(label, *(f"{count:,}" for count in counts), _ratio(*counts))
    bytes_moved = [w[GEMM].bytes + w[MEMORY].bytes for w in whole]
    table.add_row("whole step: bytes, this run", *map(_amount, bytes_moved), _ratio(*bytes_moved))
    table.caption = (
        "the parts above the line of the last table, then the whole step; forward + backward, "
        "without attention's own kernels"
    )
    return table


def _bytes(rows: Iterable[CostRow]) -> int:
    total = sums(rows)
    return total[GEMM].bytes + total[MEMORY].bytes


def _ratio(old: int, new: int) -> str:
    return f"{new / old:.2f}" if old else "-"


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", width=WIDTH)
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def _without_path(name: str) -> str:
    """ "model.layers.7.mlp.up_proj.weight" -> "mlp.up_proj.weight"."""
    return re.sub(r"^(model\.)?(layers\.\d+\.)?", "", name)


def _relative(error: float, norm: float) -> float:
    return error / norm if norm > 0 else error


def _amount(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e10 else f"{size / 1e9:,.1f} GB"
