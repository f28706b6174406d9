"""What the demo prints, 80 columns wide, and what it saves.

`demo.json` (schema 1) holds everything that is printed and more: `settings`, `model`,
`environment`, `runs` (losses, seconds, peak_bytes of each), `losses` (deviation and allowance per
step), `gradients` (one entry per parameter), `kernels` (per side: `watched` and `computed` sums of
the decoder layers, each distinct kernel with its count; `real_step`, the sums computed for more
tokens; and the sums of the other regions), `criteria` and `passed`. Numbers that are not finite are
null.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from codetta.demo.judge import Criterion, Gradient, LossStep
from codetta.demo.kernels import ATTENTION, GEMM, MEMORY, CostRow, KernelRow, launches, sums
from codetta.demo.train import Run

WIDTH = 80
SCHEMA = 1


@dataclass
class KernelSide:
    """The kernels of one side (stock or CODA), twice: watched in step 1, computed from formulas."""

    name: str
    watched: dict[str, list[KernelRow]]  # by region
    computed: Sequence[CostRow]  # of the region "layers"
    real_step: Sequence[CostRow]  # computed for a step of more tokens
    real_step_tokens: tuple[int, int]  # batch, seq

    @property
    def layers(self) -> list[KernelRow]:
        return self.watched.get("layers", [])


@dataclass
class Result:
    """All that the demo found out."""

    settings: dict[str, Any]
    model: dict[str, Any]
    environment: dict[str, Any]
    runs: list[Run]  # CODA's is the last
    losses: list[LossStep]
    deviation: str  # what `losses` measure
    gradients: list[Gradient]
    kernels: list[KernelSide]
    criteria: list[Criterion]

    @property
    def passed(self) -> bool:
        return all(criterion.passed for criterion in self.criteria)


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
    table = _table("Kernels of the decoder layers, forward + backward", "", *headings)
    columns = [sums(rows) for side in sides for rows in (side.layers, side.computed)]
    for kind, label in (
        (GEMM, "GEMMs"),
        (MEMORY, "memory-bound kernels"),
        (ATTENTION, "attention kernels"),
    ):
        table.add_row(label, *(f"{column[kind].kernels:,}" for column in columns))
        table.add_row("  bytes moved", *(_amount(column[kind].bytes) for column in columns))
    table.caption = "watched: every operation of step 1; computed: from formulas alone"
    return table


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
    old, new = sums(before.layers), sums(after.layers)
    for kind, label in ((GEMM, "GEMMs"), (MEMORY, "memory-bound kernels")):
        kernels = (old[kind].kernels, new[kind].kernels)
        table.add_row(label, *(f"{count:,}" for count in kernels), _ratio(*kernels))
    batch, seq = before.real_step_tokens
    for label, moved in (
        ("bytes, this run (watched)", (_bytes(before.layers), _bytes(after.layers))),
        (
            f"bytes, {batch} × {seq} tokens (computed)",
            (_bytes(before.real_step), _bytes(after.real_step)),
        ),
    ):
        table.add_row(label, *map(_amount, moved), _ratio(*moved))
    table.caption = "decoder layers, forward + backward, without attention's own kernels"
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


# ------------------------------------------------------------------------------------- saving
def save_json(path: Path, result: Result) -> None:
    path.write_text(as_json(result), encoding="utf-8")


def as_json(result: Result) -> str:
    return json.dumps(_finite(_as_dict(result)), indent=1, allow_nan=False, ensure_ascii=False)


def _as_dict(result: Result) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "passed": result.passed,
        "criteria": [asdict(criterion) for criterion in result.criteria],
        "settings": result.settings,
        "model": result.model,
        "environment": result.environment,
        "runs": [
            {
                "name": run.name,
                "dtype": str(run.dtype).removeprefix("torch."),
                "losses": run.losses,
                "seconds": run.seconds,
                "seconds_per_step": run.seconds_per_step,
                "peak_bytes": run.peak_bytes,
            }
            for run in result.runs
        ],
        "losses": {
            "deviation": result.deviation,
            "steps": [asdict(row) | {"passed": row.passed} for row in result.losses],
        },
        "gradients": [asdict(row) | {"passed": row.passed} for row in result.gradients],
        "kernels": [_kernels_as_dict(side) for side in result.kernels],
    }


def _kernels_as_dict(side: KernelSide) -> dict[str, Any]:
    return {
        "name": side.name,
        "watched": _sums_as_dict(side.layers) | {"kernels": _rows_as_dicts(side.layers)},
        "computed": _sums_as_dict(side.computed) | {"kernels": _rows_as_dicts(side.computed)},
        "real_step": _sums_as_dict(side.real_step) | {"batch_seq": side.real_step_tokens},
        "other_regions": {
            region: _sums_as_dict(rows)
            for region, rows in side.watched.items()
            if region != "layers"
        },
    }


def _sums_as_dict(rows: Iterable[CostRow]) -> dict[str, Any]:
    return {kind: asdict(total) for kind, total in sums(rows).items()}


def _rows_as_dicts(rows: Iterable[CostRow]) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "name": name, "bytes": size, "count": count}
        for (kind, name, size), count in launches(rows).items()
    ]


def _finite(value: Any) -> Any:
    """`value` with every number that JSON cannot hold replaced by None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
