"""RMSNorm of each head and a partial rotary embedding, of a q or k projection."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput, Workload

EPS, HEAD, ROTARY = 1e-6, 16, 8


def reference(acc: Tensor, weight: Tensor, rope: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
    table, positions = rope
    cos, sin = (x[:, None, :] for x in table[positions].to(acc.dtype).chunk(2, dim=1))
    heads = acc.reshape(acc.shape[0], -1, HEAD)
    rstd = torch.rsqrt(heads.square().mean(2, keepdim=True) + EPS)
    x = (heads * rstd) * weight.unflatten(-1, (-1, HEAD))
    a, b, rest = x.split((ROTARY // 2, ROTARY // 2, HEAD - ROTARY), dim=2)
    turned = torch.cat((a * cos - b * sin, a * sin + b * cos, rest), dim=2)
    return {"q": turned.reshape(acc.shape)}


TASK = Task(
    name="head_norm_rotary",
    title="RMSNorm of each head, then rotary embedding of its first columns",
    level="hard",
    formula=(
        "x = acc / sqrt(mean of acc² over the row's head + eps) * weight\n"
        "    a head is head_dim adjacent columns\n"
        "q: in each head, for j < rotary_dim / 2, with a = x[j], b = x[j + rotary_dim / 2],\n"
        "    q[j] = a cos - b sin, q[j + rotary_dim / 2] = a sin + b cos,\n"
        "    cos and sin being columns j of the table's halves, at the row's position;\n"
        "    q = x in the head's other columns"
    ),
    operands=(
        TaskOperand("weight", "row", "weight of the norms, by column"),
        TaskOperand(
            "rope",
            "rotary",
            "cosines and sines by position, and positions",
            dtype="float32",
            values="angles",
            differentiable=False,
        ),
    ),
    outputs=(TaskOutput("q", "tile", "normalized and rotated heads"),),
    reference=reference,
    constants={"eps": EPS, "head_dim": HEAD, "rotary_dim": ROTARY},
    granule=HEAD,
    correctness=(
        Workload(129, 272, 72),
        Workload(1, 16, 8, "float32"),
        Workload(300, 528, 256, "float16"),
    ),
    near=("qk_norm_rotary", "row_scale_rotary"),
    notes=(
        "Pairs are halves of the rotary columns. A head's columns lie in several threads, so on "
        "the fused backend this is the product and one kernel over its result."
    ),
)
