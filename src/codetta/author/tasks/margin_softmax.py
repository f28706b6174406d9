"""Softmax of cosines with an additive margin at the target (CosFace, arXiv 1801.09414)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput, Workload

MARGIN, SCALE = 0.2, 16.0


def reference(
    acc: Tensor, row_inverse: Tensor, class_inverse: Tensor, target: Tensor
) -> Mapping[str, Tensor]:
    hit = target[:, None] == torch.arange(acc.shape[1], device=acc.device)
    cosine = acc * row_inverse[:, None] * class_inverse
    z = SCALE * torch.where(hit, cosine - MARGIN, cosine)
    logit = torch.where(hit, z, torch.zeros_like(z)).sum(1)
    return {"z": z, "loss": torch.logsumexp(z, 1) - logit}


def addends(
    acc: Tensor, row_inverse: Tensor, class_inverse: Tensor, target: Tensor
) -> Mapping[str, Tensor]:
    z = SCALE * ((acc * row_inverse[:, None] * class_inverse).abs() + MARGIN)
    return {"z": z, "loss": z.amax(1) + torch.logsumexp(z, 1).abs()}


TASK = Task(
    name="margin_softmax",
    title="Scaled cosines with a margin taken off at the target, and their cross-entropy",
    level="hard",
    formula=(
        "cosine = row_inverse ⊙ acc ⊙ class_inverse\n"
        "z[m, n] = scale (cosine[m, n] - (margin where n = target[m], else 0))\n"
        "loss[m] = log sum over n of e^z[m, n] - z[m, target[m]]\n"
        "          z[m, target[m]] counts as 0 where target[m] is no column"
    ),
    operands=(
        TaskOperand(
            "row_inverse", "col", "one over the length of each row", dtype="float32", values="scale"
        ),
        TaskOperand(
            "class_inverse",
            "row",
            "one over the length of each class",
            dtype="float32",
            values="scale",
        ),
        TaskOperand(
            "target", "index", "column of the true class", values="index", differentiable=False
        ),
    ),
    outputs=(
        TaskOutput("z", "tile", "logits with margin"),
        TaskOutput("loss", "col", "loss of each row, of z before its store"),
    ),
    reference=reference,
    addends=addends,
    constants={"margin": MARGIN, "scale": SCALE},
    benchmark=(Workload(8192, 32768, 2048),),
    near=("cross_entropy_backward", "row_scale_lse_target"),
)
