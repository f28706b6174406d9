"""Statistics of each channel over the batch, for the BatchNorm (arXiv 1502.03167) that follows."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput


def reference(acc: Tensor, bias: Tensor) -> Mapping[str, Tensor]:
    x = acc + bias
    return {"x": x, "mean": x.mean(0), "square_mean": x.square().mean(0)}


def addends(acc: Tensor, bias: Tensor) -> Mapping[str, Tensor]:
    x = acc.abs() + bias.abs()
    return {"x": x, "mean": x.mean(0), "square_mean": x.square().mean(0)}


TASK = Task(
    name="batch_norm_partials",
    title="Linear with bias, with mean and mean square of each column",
    level="medium",
    formula=(
        "x = acc + bias, rounded to the dtype it is stored in\n"
        "mean[n] = sum over m of x / M\n"
        "square_mean[n] = sum over m of x² / M"
    ),
    operands=(TaskOperand("bias", "row", "bias of the Linear"),),
    outputs=(
        TaskOutput("x", "tile", "the Linear's result"),
        TaskOutput("mean", "row", "mean of each column of x"),
        TaskOutput("square_mean", "row", "mean square of each column of x"),
    ),
    reference=reference,
    addends=addends,
    near=("bias", "residual_ssq"),
)
