"""Weight normalization behind the product (Salimans and Kingma, arXiv 1602.07868)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput

EPS = 1e-6


def reference(acc: Tensor, gain: Tensor, square_norm: Tensor, bias: Tensor) -> Mapping[str, Tensor]:
    return {"y": acc * (gain * torch.rsqrt(square_norm + EPS)) + bias}


def addends(acc: Tensor, gain: Tensor, square_norm: Tensor, bias: Tensor) -> Mapping[str, Tensor]:
    return {"y": (acc * (gain * torch.rsqrt(square_norm + EPS))).abs() + bias.abs()}


TASK = Task(
    name="weight_norm_scale",
    title="Linear with a weight-normalized weight and bias",
    level="easy",
    formula="y = acc gain / sqrt(square_norm + eps) + bias",
    operands=(
        TaskOperand("gain", "row", "g, the length of each row of the weight"),
        TaskOperand(
            "square_norm",
            "row",
            "sum of squares of each row of v",
            dtype="float32",
            values="positive",
        ),
        TaskOperand("bias", "row", "bias of the Linear"),
    ),
    outputs=(TaskOutput("y", "tile", "the Linear's result"),),
    reference=reference,
    addends=addends,
    constants={"eps": EPS},
    near=("row_scale_bias", "bias"),
)
