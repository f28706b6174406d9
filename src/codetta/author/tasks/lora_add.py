"""A low-rank adaptation added to a Linear (Hu et al., arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput


def reference(acc: Tensor, bias: Tensor, delta: Tensor, scale: Tensor) -> Mapping[str, Tensor]:
    return {"y": acc + bias + scale * delta}


def addends(acc: Tensor, bias: Tensor, delta: Tensor, scale: Tensor) -> Mapping[str, Tensor]:
    return {"y": acc.abs() + bias.abs() + (scale * delta).abs()}


TASK = Task(
    name="lora_add",
    title="Linear with bias and a scaled low-rank product",
    level="easy",
    formula="y = acc + bias + scale delta",
    operands=(
        TaskOperand("bias", "row", "bias of the Linear"),
        TaskOperand("delta", "tile", "the low-rank product x A B"),
        TaskOperand("scale", "scalar", "alpha / rank", dtype="float32", values="positive"),
    ),
    outputs=(TaskOutput("y", "tile", "the Linear's result"),),
    reference=reference,
    addends=addends,
    near=("bias_residual",),
)
