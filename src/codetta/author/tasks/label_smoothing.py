"""Cross-entropy with label smoothing (Szegedy et al., arXiv 1512.00567)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput, Workload

SMOOTHING = 0.1


def reference(acc: Tensor, r: Tensor, bias: Tensor, target: Tensor) -> Mapping[str, Tensor]:
    z = acc * r[:, None] + bias
    lse = torch.logsumexp(z, 1)
    inside = (target >= 0) & (target < acc.shape[1])
    picked = z.gather(1, torch.where(inside, target, 0)[:, None])[:, 0]
    logit = torch.where(inside, picked, torch.zeros_like(picked))
    return {"loss": lse - (1 - SMOOTHING) * logit - SMOOTHING * z.mean(1), "lse": lse}


def addends(acc: Tensor, r: Tensor, bias: Tensor, target: Tensor) -> Mapping[str, Tensor]:
    z = acc * r[:, None] + bias
    largest = (acc.abs() * r[:, None] + bias.abs()).amax(1)
    return {"loss": torch.logsumexp(z, 1).abs() + largest}


TASK = Task(
    name="label_smoothing",
    title="Label-smoothed cross-entropy behind an RMSNorm, with bias",
    level="hard",
    formula=(
        "z = r ⊙ acc + bias\n"
        "lse[m] = log sum over n of e^z[m, n]\n"
        "loss[m] = lse - (1 - smoothing) z[m, target[m]] - smoothing mean over n of z[m, n]\n"
        "          z[m, target[m]] counts as 0 where target[m] is no column"
    ),
    operands=(
        TaskOperand("r", "col", "row scale of the norm", dtype="float32", values="positive"),
        TaskOperand("bias", "row", "bias of the logits"),
        TaskOperand(
            "target", "index", "column of the true class", values="index", differentiable=False
        ),
    ),
    outputs=(
        TaskOutput("loss", "col", "loss of each row"),
        TaskOutput("lse", "col", "log of the softmax's denominator"),
    ),
    reference=reference,
    addends=addends,
    constants={"smoothing": SMOOTHING},
    benchmark=(Workload(8192, 32768, 2048),),
    near=("row_scale_lse_target", "row_scale_bias"),
)
