"""Biased logits with a soft cap (Gemma 2, arXiv 2408.00118)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput

CAP = 2.0


def reference(acc: Tensor, bias: Tensor) -> Mapping[str, Tensor]:
    return {"z": CAP * torch.tanh((acc + bias) / CAP)}


TASK = Task(
    name="softcap_bias",
    title="Logits with bias, bounded to (-cap, cap)",
    level="easy",
    formula="z = cap tanh((acc + bias) / cap)",
    operands=(TaskOperand("bias", "row", "bias of the logits"),),
    outputs=(TaskOutput("z", "tile", "bounded logits"),),
    reference=reference,
    constants={"cap": CAP},
    near=("softcap", "bias"),
)
