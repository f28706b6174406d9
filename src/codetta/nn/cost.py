"""Kernels and bytes of a training step, forward and backward, from Plans alone.

The Plans count themselves. In a Decoder's layers there are beside them attention's two kernels
(flash attention: q, k, v and the output with its log-sum-exp) and what PyTorch adds between the
Plans: one copy per layer that joins the gradients of q, k and v, and for 16-bit q and k norms the
rounding of their gradients. Gradients of gate and up whose rows alternate in one matrix, as on a
GPU, are copied apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from codetta.backends.layout import Tiling
from codetta.nn.block import BACKWARD, ENTRY, EXIT, MIDDLE, Spec, compiled
from codetta.plan import Cost, Plan, Schedule, cost_table

if TYPE_CHECKING:
    from collections.abc import Mapping


def layers_cost(
    spec: Spec,
    layers: int,
    schedules: Mapping[str, Schedule],
    *,
    tokens: int,
    dtype: torch.dtype,
    positions: int,
    tiling: Tiling | None = None,
) -> list[Cost]:
    """Rows of all kernels of ``layers`` layers, each with the number of its launches."""
    counts = {ENTRY: 1, MIDDLE: layers - 1, EXIT: 1}
    rows: list[Cost] = []
    for name, schedule in schedules.items():
        count = counts.get(name.split()[0], 0)
        if count:
            table = cost_table(
                schedule, tokens=tokens, dtype=dtype, positions=positions, tiling=tiling
            )
            table += _apart_cost(schedule, dtype)
            rows += [replace(row, count=count) for row in table]
    between = [*attention_cost(spec, tokens, dtype), *_rounding_cost(spec, dtype)]
    return rows + [replace(row, count=layers * row.count) for row in between]


def plan_cost(
    plan: Plan,
    wrt: tuple[str, ...],
    *,
    tokens: int,
    dtype: torch.dtype,
    positions: int,
    tiling: Tiling | None = None,
) -> list[Cost]:
    """Rows of the kernels that :func:`codetta.nn.function.apply_plan` launches for a Plan.

    Args:
        plan: optimized.
        wrt: inputs that get a gradient; every output receives one.
        positions: rows of the rotary tables.
        tiling: of the backend that launches them, see :func:`codetta.plan.cost_table`.
    """
    parts = compiled(plan, wrt, tuple(o.name for o in plan.outputs), BACKWARD)
    rows: list[Cost] = []
    for schedule in (parts.forward, parts.backward):
        if schedule is not None:
            rows += cost_table(
                schedule, tokens=tokens, dtype=dtype, positions=positions, tiling=tiling
            )
    return rows


def attention_cost(spec: Spec, tokens: int, dtype: torch.dtype) -> list[Cost]:
    """One layer's attention: forward, backward, and the joining of dq, dk and dv.

    Bytes: forward reads q, k, v and writes o and its log-sum-exp (fp32, one per token and head);
    backward reads all of these and do and writes dq, dk, dv. Its arithmetic is not counted.
    """
    q = tokens * spec.heads * spec.head_dim * dtype.itemsize
    kv = 2 * tokens * spec.kv_heads * spec.head_dim * dtype.itemsize
    lse = tokens * spec.heads * torch.promote_types(torch.float32, dtype).itemsize
    qkv = q + kv
    return [
        Cost("attention", "attention", "attention", qkv, q + lse, 0, 0),
        Cost("attention backward", "attention", "attention", 3 * q + kv + lse, qkv, 0, 0),
        Cost("join dq dk dv", "memory", "move", qkv, qkv, 0, 0),
    ]


def _apart_cost(schedule: Schedule, dtype: torch.dtype) -> list[Cost]:
    """Weights' gradients that are every other row of a merged one, see codetta.nn.function."""
    rows = []
    for out in schedule.plan.outputs:
        node = schedule.plan.nodes[out.node]
        if node.op == "every_other_row":
            size = int(node.type.rows) * int(node.type.cols) * dtype.itemsize
            rows.append(Cost(f"rows of {out.name}", "memory", "move", size, size, 0, 0))
    return rows


def _rounding_cost(spec: Spec, dtype: torch.dtype) -> list[Cost]:
    """d_norm_q and d_norm_k leave their finalizer in the accumulator's dtype."""
    wide = torch.promote_types(torch.float32, dtype)
    if not spec.qk_norm or dtype == wide:
        return []
    read, written = (spec.head_dim * t.itemsize for t in (wide, dtype))
    return [Cost("round d_norm_q, d_norm_k", "memory", "move", read, written, 0, 0, count=2)]
