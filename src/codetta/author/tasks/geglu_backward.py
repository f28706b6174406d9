"""Backward of GEGLU with the exact GELU (Shazeer, arXiv 2002.05202), with the bias gradient."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from codetta.author.task import Task, TaskOperand, TaskOutput


def reference(acc: Tensor, z: Tensor) -> Mapping[str, Tensor]:
    g, u = z[:, 0::2], z[:, 1::2]
    phi = 0.5 * (1 + torch.erf(g * 0.5**0.5))
    density = torch.exp(-0.5 * g * g) * 0.3989422804014327
    dz = torch.stack((acc * u * (phi + g * density), acc * g * phi), dim=2).flatten(1)
    return {"dz": dz, "y": g * phi * u, "dbias": dz.sum(0)}


def addends(acc: Tensor, z: Tensor) -> Mapping[str, Tensor]:
    g, u = z[:, 0::2], z[:, 1::2]
    phi = 0.5 * (1 + torch.erf(g * 0.5**0.5))
    density = torch.exp(-0.5 * g * g) * 0.3989422804014327
    dg = (acc * u).abs() * (phi + g.abs() * density)
    dz = torch.stack((dg, (acc * g).abs() * phi), dim=2).flatten(1)
    return {"dz": dz, "dbias": dz.sum(0)}


TASK = Task(
    name="geglu_backward",
    title="From dy (the product) to the gradient of GEGLU's pairs and of their bias",
    level="hard",
    formula=(
        "dy = acc, (g, u) = (z[m, 2j], z[m, 2j + 1]), j < N\n"
        "P = (1 + erf(g / sqrt 2)) / 2, p = e^(-g² / 2) / sqrt(2 pi)\n"
        "dz[m, 2j] = dy u (P + g p)\n"
        "dz[m, 2j + 1] = dy g P\n"
        "y = g P u\n"
        "dbias[n] = sum over m of dz[m, n]"
    ),
    operands=(
        TaskOperand("z", "tile", "the saved pairs, twice as wide as acc", width=Fraction(2)),
    ),
    outputs=(
        TaskOutput("dz", "tile", "gradient of the pairs, adjacent", width=Fraction(2)),
        TaskOutput("y", "tile", "the forward's result, recomputed for its weight gradient"),
        TaskOutput("dbias", "row", "sum over the rows of dz before its store", width=Fraction(2)),
    ),
    reference=reference,
    addends=addends,
    gradient=False,
    near=("geglu_backward", "swiglu_backward"),
)
