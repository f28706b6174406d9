"""Mish behind a biased Linear (Misra, arXiv 1908.08681)."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput


def reference(acc: Tensor, bias: Tensor) -> Mapping[str, Tensor]:
    return {"y": F.mish(acc + bias)}


TASK = Task(
    name="mish",
    title="Linear with bias and Mish",
    level="medium",
    formula="y = x tanh(softplus(x))        x = acc + bias, softplus(x) = log(1 + e^x)",
    operands=(TaskOperand("bias", "row", "bias of the Linear"),),
    outputs=(TaskOutput("y", "tile", "activation"),),
    reference=reference,
    near=("bias_gelu",),
    notes="e^x overflows for large x: softplus(x) = max(x, 0) + log(1 + e^-|x|) does not.",
)
