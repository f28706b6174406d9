"""A residual stream stored twice, in 16 bits and in fp8, with what the next scale needs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput

LARGEST = 448.0


def reference(acc: Tensor, residual: Tensor, gain: Tensor) -> Mapping[str, Tensor]:
    x = acc + residual
    return {"x": x, "q": (x * gain).clamp(-LARGEST, LARGEST), "amax": x.abs().amax(1)}


def addends(acc: Tensor, residual: Tensor, gain: Tensor) -> Mapping[str, Tensor]:
    x = acc.abs() + residual.abs()
    return {"x": x, "amax": x.amax(1)}


TASK = Task(
    name="row_amax_fp8",
    title="Residual, its fp8 copy, and the largest magnitude of each row",
    level="medium",
    formula=(
        "x = acc + residual, rounded to the dtype it is stored in\n"
        "q = x gain, stored in e4m3 (which saturates at ±448)\n"
        "amax[m] = max over n of |x[m, n]|"
    ),
    operands=(
        TaskOperand("residual", "tile", "the residual stream"),
        TaskOperand("gain", "scalar", "one over the fp8 scale", dtype="float32", values="gain"),
    ),
    outputs=(
        TaskOutput("x", "tile", "the residual stream, continued"),
        TaskOutput("q", "tile", "its quantized copy", dtype="e4m3"),
        TaskOutput("amax", "col", "largest magnitude of each row, for the next scale"),
    ),
    reference=reference,
    addends=addends,
    gradient=False,
    near=("fp8_quantized", "residual_ssq"),
    notes="q and amax see x as it was rounded.",
)
