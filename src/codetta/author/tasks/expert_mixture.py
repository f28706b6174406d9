"""One expert of a mixture, weighted by the router and added to the others."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput


def reference(acc: Tensor, weight: Tensor, bias: Tensor, total: Tensor) -> Mapping[str, Tensor]:
    return {"y": total + weight[:, None] * (acc + bias)}


def addends(acc: Tensor, weight: Tensor, bias: Tensor, total: Tensor) -> Mapping[str, Tensor]:
    return {"y": total.abs() + weight[:, None].abs() * (acc.abs() + bias.abs())}


TASK = Task(
    name="expert_mixture",
    title="Add an expert's output, weighted per token, to the sum over experts",
    level="easy",
    formula="y = total + weight ⊙ (acc + bias)",
    operands=(
        TaskOperand("weight", "col", "router's weight of each token", values="positive"),
        TaskOperand("bias", "row", "bias of the expert"),
        TaskOperand("total", "tile", "sum over the experts before this one"),
    ),
    outputs=(TaskOutput("y", "tile", "sum over the experts up to this one"),),
    reference=reference,
    addends=addends,
    near=("row_scale_bias", "residual"),
)
