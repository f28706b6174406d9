"""ReGLU of a biased projection (Shazeer, arXiv 2002.05202), which keeps its preactivation."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch.nn.functional as F
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput


def reference(acc: Tensor, bias: Tensor) -> Mapping[str, Tensor]:
    z = acc + bias
    return {"z": z, "y": F.relu(z[:, 0::2]) * z[:, 1::2]}


def addends(acc: Tensor, bias: Tensor) -> Mapping[str, Tensor]:
    z = acc.abs() + bias.abs()
    return {"z": z, "y": z[:, 0::2] * z[:, 1::2]}


TASK = Task(
    name="reglu_bias",
    title="ReGLU of adjacent pairs behind a bias; the pairs are stored too",
    level="medium",
    formula="z = acc + bias\ny[m, j] = max(z[m, 2j], 0) z[m, 2j + 1]",
    operands=(TaskOperand("bias", "row", "bias of the projection, as wide as acc"),),
    outputs=(
        TaskOutput("z", "tile", "preactivation, for the backward"),
        TaskOutput("y", "tile", "gated activation", width=Fraction(1, 2)),
    ),
    reference=reference,
    addends=addends,
    granule=2,
    near=("row_scale_swiglu",),
    notes="The gate is applied to z before it is rounded for its store.",
)
