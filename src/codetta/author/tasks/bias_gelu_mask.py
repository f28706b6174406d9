"""GELU behind a biased Linear, with a dropout mask applied."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput


def reference(acc: Tensor, bias: Tensor, keep: Tensor) -> Mapping[str, Tensor]:
    return {"y": F.gelu(acc + bias) * keep}


TASK = Task(
    name="bias_gelu_mask",
    title="Linear with bias, exact GELU and a dropout mask",
    level="easy",
    formula="y = gelu(acc + bias) * keep        gelu(x) = x (1 + erf(x / sqrt 2)) / 2",
    operands=(
        TaskOperand("bias", "row", "bias of the Linear"),
        TaskOperand(
            "keep", "tile", "0 where dropped, else 1 / (1 - p)", values="keep", differentiable=False
        ),
    ),
    outputs=(TaskOutput("y", "tile", "activation"),),
    reference=reference,
    near=("bias_gelu",),
)
