"""Swish with a learned slope (Ramachandran et al., arXiv 1710.05941)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput


def reference(acc: Tensor, bias: Tensor, beta: Tensor) -> Mapping[str, Tensor]:
    x = acc + bias
    return {"y": x * torch.sigmoid(beta * x)}


TASK = Task(
    name="swish_beta",
    title="Linear with bias and Swish, whose slope is learned",
    level="easy",
    formula="y = x sigmoid(beta x)        x = acc + bias",
    operands=(
        TaskOperand("bias", "row", "bias of the Linear"),
        TaskOperand("beta", "scalar", "slope, one learned number", dtype="float32"),
    ),
    outputs=(TaskOutput("y", "tile", "activation"),),
    reference=reference,
    near=("bias_gelu",),
)
