"""Scales and zero points of a quantized product, taken out behind it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput


def reference(
    acc: Tensor, row_scale: Tensor, channel_scale: Tensor, zero: Tensor, channel_sum: Tensor
) -> Mapping[str, Tensor]:
    centred = acc - zero[:, None] * channel_sum
    return {"y": row_scale[:, None] * channel_scale * centred}


def addends(
    acc: Tensor, row_scale: Tensor, channel_scale: Tensor, zero: Tensor, channel_sum: Tensor
) -> Mapping[str, Tensor]:
    scale = (row_scale[:, None] * channel_scale).abs()
    return {"y": scale * (acc.abs() + (zero[:, None] * channel_sum).abs())}


TASK = Task(
    name="dequantize_channel",
    title="Dequantize per row and per channel, with a zero point per row",
    level="easy",
    formula="y = row_scale ⊙ channel_scale ⊙ (acc - zero ⊙ channel_sum)",
    operands=(
        TaskOperand("row_scale", "col", "scale of each row of a", dtype="float32", values="scale"),
        TaskOperand(
            "channel_scale", "row", "scale of each column of b", dtype="float32", values="scale"
        ),
        TaskOperand("zero", "col", "zero point of each row of a", dtype="float32"),
        TaskOperand("channel_sum", "row", "sum of each column of b", dtype="float32"),
    ),
    outputs=(TaskOutput("y", "tile", "the product of what was quantized"),),
    reference=reference,
    addends=addends,
    near=("fp8_scaled", "layernorm_apply"),
)
