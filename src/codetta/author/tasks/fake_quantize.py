"""Quantization as training sees it: rounded to fp8 and back, straight through backward.

(Bengio et al., arXiv 1308.3432.)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput

LARGEST = 448.0


def reference(acc: Tensor, bias: Tensor, gain: Tensor) -> Mapping[str, Tensor]:
    z = acc + bias
    scaled = z * gain
    rounded = scaled.detach().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(scaled.dtype)
    straight = (scaled - scaled.detach()).nan_to_num(0.0, 0.0, 0.0)  # zero, with a derivative of 1
    y = (rounded + straight) / gain
    return {"y": y, "amax": z.abs().amax(1)}


TASK = Task(
    name="fake_quantize",
    title="Round to e4m3 and back, and the largest magnitude of each row",
    level="medium",
    formula=(
        "z = acc + bias\n"
        "y = e4m3(z gain) / gain        e4m3(x): x rounded to e4m3 and back, derivative 1\n"
        "amax[m] = max over n of |z[m, n]|"
    ),
    operands=(
        TaskOperand("bias", "row", "bias of the Linear"),
        TaskOperand(
            "gain",
            "row",
            "one over the scale of each channel",
            dtype="float32",
            values="gain",
            differentiable=False,
        ),
    ),
    outputs=(
        TaskOutput("y", "tile", "z as its quantized copy has it", dtype="bf16"),
        TaskOutput("amax", "col", "largest magnitude of each row, before quantization"),
    ),
    reference=reference,
    near=("fp8_quantized", "bias"),
    notes="y is stored in bf16 whatever the dtype of a. Rounding to e4m3 saturates at ±448.",
)
