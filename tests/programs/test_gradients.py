"""Derived gradients of every ready program, through the public call, against finite differences."""

from __future__ import annotations

import pytest
import torch
from program_oracle import inputs

import codetta
from codetta.language.types import NUMERIC
from codetta.programs import catalog

# An fp8 store has no derivative.
GEMMS = [n for n, e in catalog().items() if e.program.has_acc and n != "fp8_quantized"]


@pytest.mark.parametrize("name", GEMMS)
def test_gradients_equal_finite_differences(name):
    program = catalog()[name].program
    torch.manual_seed(0)
    m, n, k = 3, 16, 2
    _, operands = inputs(program, m, n, torch.float64)
    if "rope" in operands:  # a table of one row per token
        operands["rope"] = (torch.cat(operands["rope"], dim=1), torch.arange(m))
    fixed = ("normed", "target", "rope")
    kinds = {o.name: o.kind for o in program.operands}
    moved = [o for o in operands if kinds[o] in NUMERIC and o not in fixed]
    a, b = torch.randn(m, k).double(), torch.randn(k, n).double()

    def call(a, b, *values):
        given = operands | dict(zip(moved, values, strict=True))
        out = codetta.gemm(a, b, program, tile=(2, 8), **given)
        return out if isinstance(out, torch.Tensor) else tuple(out)

    tensors = [t.requires_grad_() for t in (a, b, *(operands[o] for o in moved))]
    assert torch.autograd.gradcheck(call, tensors)
