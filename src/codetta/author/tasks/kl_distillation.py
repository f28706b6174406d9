"""Distillation: KL divergence from a teacher's logits (Hinton et al., arXiv 1503.02531)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput, Workload

TEMPERATURE = 2.0


def reference(acc: Tensor, teacher: Tensor) -> Mapping[str, Tensor]:
    ours = torch.log_softmax(acc / TEMPERATURE, 1)
    theirs = torch.log_softmax(teacher / TEMPERATURE, 1)
    p = theirs.exp()
    terms = torch.where(p == 0, torch.zeros_like(p), p * (theirs - ours))
    return {"kl": TEMPERATURE**2 * terms.sum(1)}


def addends(acc: Tensor, teacher: Tensor) -> Mapping[str, Tensor]:
    s, t = acc / TEMPERATURE, teacher / TEMPERATURE
    ride = (torch.softmax(t, 1) * (t.abs() + s.abs())).sum(1)
    ends = torch.logsumexp(t, 1).abs() + torch.logsumexp(s, 1).abs()
    return {"kl": TEMPERATURE**2 * (ride + ends)}


TASK = Task(
    name="kl_distillation",
    title="KL divergence of each row's softmax from a teacher's, at a temperature",
    level="hard",
    formula=(
        "s = acc / temperature, t = teacher / temperature, p = softmax over n of t\n"
        "kl[m] = temperature² sum over n of p (log p - log softmax(s))\n"
        "      = temperature² (sum over n of p (t - s) - lse(t) + lse(s))\n"
        "        lse(x) = log sum over n of e^x"
    ),
    operands=(TaskOperand("teacher", "tile", "the teacher's logits", differentiable=False),),
    outputs=(TaskOutput("kl", "col", "divergence of each row"),),
    reference=reference,
    addends=addends,
    constants={"temperature": TEMPERATURE},
    benchmark=(Workload(8192, 32768, 2048),),
    near=("row_scale_lse_target",),
    notes="Neither softmax may be completed first: a sum of p times something rides along.",
)
