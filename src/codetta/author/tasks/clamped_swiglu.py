"""SwiGLU with clamped gate and up, as in gpt-oss (arXiv 2508.10925)."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput

LIMIT, SLOPE = 2.0, 1.702


def reference(acc: Tensor, bias: Tensor) -> Mapping[str, Tensor]:
    z = acc + bias
    limit = z.new_full((), LIMIT)
    gate = torch.minimum(z[:, 0::2], limit)
    up = torch.maximum(torch.minimum(z[:, 1::2], limit), -limit)
    return {"y": gate * torch.sigmoid(SLOPE * gate) * (up + 1)}


TASK = Task(
    name="clamped_swiglu",
    title="SwiGLU of adjacent pairs behind a bias, gate and up clamped",
    level="medium",
    formula=(
        "y[m, j] = g sigmoid(slope g) (u + 1)        z = acc + bias\n"
        "g = min(z[m, 2j], limit)\n"
        "u = max(min(z[m, 2j + 1], limit), -limit)"
    ),
    operands=(TaskOperand("bias", "row", "bias of the projection, as wide as acc"),),
    outputs=(TaskOutput("y", "tile", "gated activation", width=Fraction(1, 2)),),
    reference=reference,
    constants={"limit": LIMIT, "slope": SLOPE},
    granule=2,
    near=("swiglu",),
)
