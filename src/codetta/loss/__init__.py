"""The loss head: linear layer and cross-entropy in one, without stored logits."""

from __future__ import annotations

from codetta.loss.call import linear_cross_entropy
from codetta.loss.options import LinearCrossEntropyOutput
from codetta.loss.plan import LossPlan, Problem, choose

__all__ = [
    "LinearCrossEntropyOutput", "LossPlan", "Problem", "choose", "linear_cross_entropy",
]  # fmt: skip
