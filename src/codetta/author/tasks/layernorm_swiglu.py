"""The consuming half of a LayerNorm link, with its rank-1 correction, and SwiGLU behind it."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch.nn.functional as F
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput


def reference(
    acc: Tensor, rstd: Tensor, mean: Tensor, s: Tensor, t: Tensor
) -> Mapping[str, Tensor]:
    z = (rstd[:, None] * (acc - mean[:, None] * s) + t).to(acc.dtype)  # as PyTorch stores it
    return {"z": z, "y": F.silu(z[:, 0::2]) * z[:, 1::2]}


def addends(acc: Tensor, rstd: Tensor, mean: Tensor, s: Tensor, t: Tensor) -> Mapping[str, Tensor]:
    z = rstd.abs()[:, None] * (acc.abs() + (mean[:, None] * s).abs()) + t.abs()
    return {"z": z, "y": z[:, 0::2] * z[:, 1::2]}


TASK = Task(
    name="layernorm_swiglu",
    title="LayerNorm finished behind the product, then SwiGLU of adjacent pairs",
    level="hard",
    formula=(
        "z = rstd ⊙ (acc - mean ⊙ s) + t, rounded to the dtype it is stored in\n"
        "y[m, j] = silu(z[m, 2j]) z[m, 2j + 1]        silu(x) = x sigmoid(x)"
    ),
    operands=(
        TaskOperand(
            "rstd",
            "col",
            "one over each row's standard deviation",
            dtype="float32",
            values="positive",
        ),
        TaskOperand("mean", "col", "mean of each row", dtype="float32"),
        TaskOperand("s", "row", "sum of each column of b", dtype="float32"),
        TaskOperand("t", "row", "the norm's shift, multiplied by b, and bias", dtype="float32"),
    ),
    outputs=(
        TaskOutput("z", "tile", "preactivation, for the backward"),
        TaskOutput("y", "tile", "gated activation", width=Fraction(1, 2)),
    ),
    reference=reference,
    addends=addends,
    granule=2,
    near=("layernorm_apply_gelu", "row_scale_swiglu"),
    notes="The activation sees z as it was rounded.",
)
