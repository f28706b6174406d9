"""Stochastic depth: a branch that some rows skip (Huang et al., arXiv 1603.09382)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput


def reference(acc: Tensor, mask: Tensor, residual: Tensor) -> Mapping[str, Tensor]:
    branch = torch.where(mask[:, None] > 0.5, acc, torch.zeros_like(acc))
    return {"x": residual + branch}


def addends(acc: Tensor, mask: Tensor, residual: Tensor) -> Mapping[str, Tensor]:
    branch = torch.where(mask[:, None] > 0.5, acc.abs(), torch.zeros_like(acc))
    return {"x": residual.abs() + branch}


TASK = Task(
    name="masked_residual",
    title="Add a branch to the residual stream in the rows that take it",
    level="easy",
    formula="x = residual + acc where mask > 0.5\nx = residual       elsewhere",
    operands=(
        TaskOperand(
            "mask",
            "col",
            "1: the row takes the branch, 0: it skips it",
            values="mask",
            differentiable=False,
        ),
        TaskOperand("residual", "tile", "the residual stream"),
    ),
    outputs=(TaskOutput("x", "tile", "the residual stream, continued"),),
    reference=reference,
    addends=addends,
    near=("residual",),
    notes="A row that skips the branch is its residual alone, also where acc is NaN or infinite.",
)
