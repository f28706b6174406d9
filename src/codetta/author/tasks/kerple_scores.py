"""Attention scores with a logarithmic relative position bias (KERPLE, arXiv 2205.09921)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput

SCALE = 0.5


def reference(
    acc: Tensor, query: Tensor, key: Tensor, decay: Tensor, stretch: Tensor
) -> Mapping[str, Tensor]:
    distance = (query[:, None] - key).abs()
    s = SCALE * acc - decay * torch.log(1 + stretch * distance)
    return {"s": s, "top": s.amax(1)}


def addends(
    acc: Tensor, query: Tensor, key: Tensor, decay: Tensor, stretch: Tensor
) -> Mapping[str, Tensor]:
    distance = (query[:, None] - key).abs()
    s = SCALE * acc.abs() + decay.abs() * torch.log(1 + stretch * distance)
    return {"s": s, "top": s.amax(1)}


TASK = Task(
    name="kerple_scores",
    title="Scores minus the logarithm of the distance, and the largest of each row",
    level="medium",
    formula=(
        "s = scale acc - decay log(1 + stretch |query - key|)\ntop[m] = max over n of s[m, n]"
    ),
    operands=(
        TaskOperand(
            "query",
            "col",
            "position of each row",
            dtype="float32",
            values="position",
            differentiable=False,
        ),
        TaskOperand(
            "key",
            "row",
            "position of each column",
            dtype="float32",
            values="position",
            differentiable=False,
        ),
        TaskOperand("decay", "scalar", "learned, > 0", dtype="float32", values="positive"),
        TaskOperand("stretch", "scalar", "learned, > 0", dtype="float32", values="positive"),
    ),
    outputs=(
        TaskOutput("s", "tile", "scores"),
        TaskOutput("top", "col", "largest score of each row, before rounding"),
    ),
    reference=reference,
    addends=addends,
    constants={"scale": SCALE},
    near=("fp8_quantized", "row_scale_bias"),
)
