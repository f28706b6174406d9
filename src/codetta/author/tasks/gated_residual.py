"""The gated residual of adaptive LayerNorm blocks (Peebles and Xie, arXiv 2212.09748)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput


def reference(acc: Tensor, bias: Tensor, gate: Tensor, residual: Tensor) -> Mapping[str, Tensor]:
    return {"x": residual + gate * (acc + bias)}


def addends(acc: Tensor, bias: Tensor, gate: Tensor, residual: Tensor) -> Mapping[str, Tensor]:
    return {"x": residual.abs() + gate.abs() * (acc.abs() + bias.abs())}


TASK = Task(
    name="gated_residual",
    title="Linear with bias, gated per channel and added to the residual stream",
    level="easy",
    formula="x = residual + gate * (acc + bias)",
    operands=(
        TaskOperand("bias", "row", "bias of the Linear"),
        TaskOperand("gate", "row", "gate of each channel, from the conditioning"),
        TaskOperand("residual", "tile", "the residual stream"),
    ),
    outputs=(TaskOutput("x", "tile", "the residual stream, continued"),),
    reference=reference,
    addends=addends,
    near=("bias_residual",),
)
