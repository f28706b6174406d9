"""The producing half of a LayerNorm link, behind a gated residual."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput

EPS = 1e-5


def reference(acc: Tensor, bias: Tensor, gate: Tensor, residual: Tensor) -> Mapping[str, Tensor]:
    x = residual + gate * (acc + bias)
    mean = x.mean(1)
    variance = (x - mean[:, None]).square().mean(1)
    return {"x": x, "mean": mean, "rstd": torch.rsqrt(variance + EPS)}


def addends(acc: Tensor, bias: Tensor, gate: Tensor, residual: Tensor) -> Mapping[str, Tensor]:
    x = residual.abs() + gate.abs() * (acc.abs() + bias.abs())
    return {"x": x, "mean": x.mean(1)}


TASK = Task(
    name="layernorm_producer",
    title="Gated residual, with mean and rstd of each row for the LayerNorm that follows",
    level="medium",
    formula=(
        "x = residual + gate * (acc + bias), rounded to the dtype it is stored in\n"
        "mean[m] = mean over n of x\n"
        "rstd[m] = 1 / sqrt(mean over n of (x - mean)² + eps)"
    ),
    operands=(
        TaskOperand("bias", "row", "bias of the Linear"),
        TaskOperand("gate", "row", "gate of each channel"),
        TaskOperand("residual", "tile", "the residual stream"),
    ),
    outputs=(
        TaskOutput("x", "tile", "the residual stream, continued"),
        TaskOutput("mean", "col", "mean of each row of x"),
        TaskOutput("rstd", "col", "one over the standard deviation of each row of x"),
    ),
    reference=reference,
    addends=addends,
    constants={"eps": EPS},
    near=("layernorm_statistics",),
    notes="Take the variance from moments: the difference of sums cancels.",
)
