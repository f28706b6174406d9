"""Weighted cross-entropy of capped logits with a z-loss (PaLM, arXiv 2204.02311)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput, Workload

CAP, COEFFICIENT = 3.0, 0.01


def reference(acc: Tensor, target: Tensor, weight: Tensor) -> Mapping[str, Tensor]:
    z = CAP * torch.tanh(acc / CAP)
    lse = torch.logsumexp(z, 1)
    inside = (target >= 0) & (target < acc.shape[1])
    picked = z.gather(1, torch.where(inside, target, 0)[:, None])[:, 0]
    logit = torch.where(inside, picked, torch.zeros_like(picked))
    return {"loss": weight * (lse - logit + COEFFICIENT * lse.square()), "lse": lse}


def addends(acc: Tensor, target: Tensor, weight: Tensor) -> Mapping[str, Tensor]:
    z = CAP * torch.tanh(acc / CAP)
    lse = torch.logsumexp(z, 1).abs()
    return {"loss": weight.abs() * (lse + CAP + COEFFICIENT * lse.square())}


TASK = Task(
    name="z_loss",
    title="Weighted cross-entropy of soft-capped logits, with a z-loss",
    level="hard",
    formula=(
        "z = cap tanh(acc / cap)\n"
        "lse[m] = log sum over n of e^z[m, n]\n"
        "loss[m] = weight (lse - z[m, target[m]] + coefficient lse²)\n"
        "          z[m, target[m]] counts as 0 where target[m] is no column"
    ),
    operands=(
        TaskOperand(
            "target", "index", "column of the true class", values="index", differentiable=False
        ),
        TaskOperand("weight", "col", "weight of each token", dtype="float32", values="positive"),
    ),
    outputs=(
        TaskOutput("loss", "col", "loss of each row"),
        TaskOutput("lse", "col", "log of the softmax's denominator"),
    ),
    reference=reference,
    addends=addends,
    constants={"cap": CAP, "coefficient": COEFFICIENT},
    benchmark=(Workload(8192, 32768, 2048),),
    near=("row_scale_lse_target", "softcap"),
    notes="No logits are stored.",
)
