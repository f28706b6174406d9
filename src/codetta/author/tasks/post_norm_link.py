"""The producing half of a post-norm, whose weight is 1 + gamma (Gemma 2, arXiv 2408.00118)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput

EPS = 1e-6


def reference(acc: Tensor, gamma: Tensor) -> Mapping[str, Tensor]:
    return {"y": acc * (1 + gamma), "r": torch.rsqrt(acc.square().mean(1) + EPS)}


TASK = Task(
    name="post_norm_link",
    title="RMSNorm of a projection's output: the weighted output and the row scale",
    level="medium",
    formula=(
        "x = acc rounded to the dtype of a\n"
        "y = x * (1 + gamma)\n"
        "r[m] = 1 / sqrt(mean over n of x² + eps)"
    ),
    operands=(TaskOperand("gamma", "row", "weight of the norm, less 1"),),
    outputs=(
        TaskOutput("y", "tile", "output without its row scale"),
        TaskOutput("r", "col", "row scale of the norm; r y is the norm's result"),
    ),
    reference=reference,
    constants={"eps": EPS},
    near=("residual_rms",),
)
