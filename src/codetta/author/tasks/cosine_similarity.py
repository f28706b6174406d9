"""Cosine similarity of each row with a target, from three sums over the row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput

EPS = 1e-6


def reference(acc: Tensor, target: Tensor) -> Mapping[str, Tensor]:
    product = (acc * target).sum(1)
    ours, theirs = acc.square().sum(1), target.square().sum(1)
    return {"y": acc, "cosine": product * torch.rsqrt(ours + EPS) * torch.rsqrt(theirs + EPS)}


def addends(acc: Tensor, target: Tensor) -> Mapping[str, Tensor]:
    product = (acc * target).abs().sum(1)
    ours, theirs = acc.square().sum(1), target.square().sum(1)
    return {"cosine": product * torch.rsqrt(ours + EPS) * torch.rsqrt(theirs + EPS)}


TASK = Task(
    name="cosine_similarity",
    title="The product, and the cosine of each of its rows with a target's",
    level="medium",
    formula=(
        "y = acc\n"
        "cosine[m] = sum(acc target) / (sqrt(sum(acc²) + eps) sqrt(sum(target²) + eps))\n"
        "            sums over n"
    ),
    operands=(TaskOperand("target", "tile", "what each row is compared with"),),
    outputs=(
        TaskOutput("y", "tile", "the product"),
        TaskOutput("cosine", "col", "cosine of each row, of acc before its store"),
    ),
    reference=reference,
    addends=addends,
    constants={"eps": EPS},
    near=("residual_rms",),
    notes="Two square roots, not one of a product, which could overflow.",
)
