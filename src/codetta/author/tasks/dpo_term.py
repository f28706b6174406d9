"""The preference loss of one token position (DPO, Rafailov et al., arXiv 2305.18290)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput, Workload

BETA = 0.5


def reference(
    acc: Tensor, target: Tensor, reference_logp: Tensor, rejected: Tensor
) -> Mapping[str, Tensor]:
    inside = (target >= 0) & (target < acc.shape[1])
    picked = acc.gather(1, torch.where(inside, target, 0)[:, None])[:, 0]
    logit = torch.where(inside, picked, torch.zeros_like(picked))
    logp = logit - torch.logsumexp(acc, 1)
    return {"loss": -F.logsigmoid(BETA * (logp - reference_logp - rejected)), "logp": logp}


def addends(
    acc: Tensor, target: Tensor, reference_logp: Tensor, rejected: Tensor
) -> Mapping[str, Tensor]:
    logp = acc.abs().amax(1) + torch.logsumexp(acc, 1).abs()
    return {"logp": logp, "loss": 1 + BETA * (logp + reference_logp.abs() + rejected.abs())}


TASK = Task(
    name="dpo_term",
    title="Minus log-sigmoid of the preference margin of each row",
    level="hard",
    formula=(
        "logp[m] = acc[m, target[m]] - log sum over n of e^acc[m, n]\n"
        "          acc[m, target[m]] counts as 0 where target[m] is no column\n"
        "h = beta (logp - reference_logp - rejected)\n"
        "loss[m] = -log sigmoid(h) = log(1 + e^-h)"
    ),
    operands=(
        TaskOperand(
            "target", "index", "column of the chosen token", values="index", differentiable=False
        ),
        TaskOperand(
            "reference_logp",
            "col",
            "log-probability under the reference model",
            dtype="float32",
            differentiable=False,
        ),
        TaskOperand("rejected", "col", "log-ratio of the rejected answer", dtype="float32"),
    ),
    outputs=(
        TaskOutput("loss", "col", "loss of each row"),
        TaskOutput("logp", "col", "log-probability of the chosen token"),
    ),
    reference=reference,
    addends=addends,
    constants={"beta": BETA},
    benchmark=(Workload(8192, 32768, 2048),),
    near=("row_scale_lse_target",),
    notes="e^-h overflows for very negative h.",
)
