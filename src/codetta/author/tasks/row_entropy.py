"""Entropy and confidence of a softmax over the logits, which are never stored."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput, Workload


def reference(acc: Tensor, beta: Tensor) -> Mapping[str, Tensor]:
    z = acc * beta
    p = torch.softmax(z, 1)
    lse = torch.logsumexp(z, 1)
    return {"entropy": lse - (p * z).sum(1), "confidence": torch.exp(z.amax(1) - lse)}


def addends(acc: Tensor, beta: Tensor) -> Mapping[str, Tensor]:
    z = acc * beta
    return {"entropy": torch.logsumexp(z, 1).abs() + (torch.softmax(z, 1) * z.abs()).sum(1)}


TASK = Task(
    name="row_entropy",
    title="Entropy of each row's softmax, and its largest probability",
    level="medium",
    formula=(
        "z = acc beta, p = softmax over n of z\n"
        "entropy[m] = log sum over n of e^z - sum over n of p z\n"
        "confidence[m] = max over n of p = e^(max z - log sum e^z)"
    ),
    operands=(
        TaskOperand(
            "beta", "scalar", "one over the temperature", dtype="float32", values="positive"
        ),
    ),
    outputs=(
        TaskOutput("entropy", "col", "entropy of each row"),
        TaskOutput("confidence", "col", "largest probability of each row"),
    ),
    reference=reference,
    addends=addends,
    benchmark=(Workload(8192, 32768, 2048),),
    near=("row_scale_lse_target",),
)
