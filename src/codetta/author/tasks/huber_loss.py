"""Huber loss of a regression head, and its slope (Huber, 1964)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput

DELTA = 1.0


def reference(acc: Tensor, bias: Tensor, target: Tensor) -> Mapping[str, Tensor]:
    d = acc + bias - target
    size, delta = d.abs(), d.new_full((), DELTA)
    loss = torch.where(size <= DELTA, 0.5 * d * d, DELTA * (size - 0.5 * DELTA))
    return {"slope": torch.maximum(torch.minimum(d, delta), -delta), "loss": loss.mean(1)}


def addends(acc: Tensor, bias: Tensor, target: Tensor) -> Mapping[str, Tensor]:
    return {"slope": acc.abs() + bias.abs() + target.abs()}


TASK = Task(
    name="huber_loss",
    title="Mean Huber loss of each row, and the loss's slope per element",
    level="medium",
    formula=(
        "d = acc + bias - target\n"
        "slope = min(max(d, -delta), delta)\n"
        "loss[m] = mean over n of (d² / 2 where |d| <= delta, else delta (|d| - delta / 2))"
    ),
    operands=(
        TaskOperand("bias", "row", "bias of the head"),
        TaskOperand("target", "tile", "what is to be predicted"),
    ),
    outputs=(
        TaskOutput("slope", "tile", "derivative of the elements' loss"),
        TaskOutput("loss", "col", "mean loss of each row"),
    ),
    reference=reference,
    addends=addends,
    constants={"delta": DELTA},
    near=("bias_residual", "residual_rms"),
)
