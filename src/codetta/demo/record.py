"""What the demo found out, and how it is saved.

`demo.json` (schema 1) holds everything that is printed and more: `settings`, `model`,
`environment`, `runs` (losses, seconds, peak_bytes of each), `losses` (deviation and allowance per
step), `gradients` (one entry per parameter), `kernels` (per side: `region`, "layers" or, in a
compiled model, "programs"; `watched` and `computed` sums of that region, each distinct kernel with
its count; `real_step`, the sums computed for more tokens; and the sums of the other regions),
`criteria` and `passed`. Numbers that are not finite are null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from codetta.demo.judge import Criterion, Gradient, LossStep
from codetta.demo.kernels import (
    ATTENTION,
    KINDS,
    LAYERS,
    CostRow,
    KernelRow,
    Sum,
    launches,
    sums,
)
from codetta.demo.train import Run

SCHEMA = 1


@dataclass
class KernelSide:
    """The kernels of one side (stock or CODA), twice: watched in step 1, computed from formulas."""

    name: str
    watched: dict[str, list[KernelRow]]  # by region
    computed: Sequence[CostRow]  # of `region`
    real_step: Sequence[CostRow]  # computed for a step of more tokens
    real_step_tokens: tuple[int, int]  # batch, seq
    region: str = LAYERS

    @property
    def inside(self) -> list[KernelRow]:
        """What was watched in `region`, and attention wherever it was."""
        elsewhere = (rows for name, rows in self.watched.items() if name != self.region)
        attention = [r for rows in elsewhere for r in rows if r.kind == ATTENTION]
        return self.watched.get(self.region, []) + attention

    @property
    def rest(self) -> dict[str, Sum]:
        """Sums of the rest of the step, which is watched only."""
        everything = sums(row for rows in self.watched.values() for row in rows)
        inside = sums(self.inside)
        return {
            kind: Sum(
                everything[kind].kernels - inside[kind].kernels,
                everything[kind].bytes - inside[kind].bytes,
            )
            for kind in KINDS
        }


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
        "region": side.region,
        "watched": _sums_as_dict(side.inside) | {"kernels": _rows_as_dicts(side.inside)},
        "computed": _sums_as_dict(side.computed) | {"kernels": _rows_as_dicts(side.computed)},
        "real_step": _sums_as_dict(side.real_step) | {"batch_seq": side.real_step_tokens},
        "other_regions": {
            region: _sums_as_dict(rows)
            for region, rows in side.watched.items()
            if region != side.region
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
