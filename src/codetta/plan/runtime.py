"""Execution of Schedules.

Every kernel is one call of a backend. Where somebody watches, it goes through a library operator
(``codetta::gemm``, ``codetta::pointwise``, ``codetta::prepare``), so a dispatch trace shows what a
GPU would launch (launch.py); views cost nothing, moves are plain PyTorch ops. The steps are bound
once per Schedule (executable.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from codetta.errors import PlanInput
from codetta.plan.schedule import Schedule


def run(schedule: Schedule, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Outputs of a schedule by name: tiles (rows, cols), vectors (length,), scalars ().

    Args:
        inputs: tensors by name; tiles two-dimensional, a Rotary input as (table, positions).

    Raises:
        PlanInput: a name is missing or unknown.
    """
    executable = schedule.executable
    if set(executable.names) != set(inputs):
        expected = list(executable.names)
        raise PlanInput(plan=schedule.plan.name, given=sorted(inputs), expected=expected)
    made = executable.run([inputs[name] for name in executable.names])
    return dict(zip(executable.outputs, made, strict=True))
