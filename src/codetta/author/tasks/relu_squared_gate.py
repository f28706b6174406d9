"""A gated activation with squared ReLU (So et al., arXiv 2109.08668)."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch.nn.functional as F
from torch import Tensor

from codetta.author.task import Task, TaskOutput


def reference(acc: Tensor) -> Mapping[str, Tensor]:
    gate, up = acc[:, 0::2], acc[:, 1::2]
    return {"y": F.relu(gate).square() * up}


TASK = Task(
    name="relu_squared_gate",
    title="Squared ReLU of the gate times up, of adjacent columns",
    level="easy",
    formula="y[m, j] = max(g, 0)² u        g = acc[m, 2j], u = acc[m, 2j + 1]",
    operands=(),
    outputs=(TaskOutput("y", "tile", "gated activation", width=Fraction(1, 2)),),
    reference=reference,
    granule=2,
    near=("swiglu", "relu_squared"),
)
