"""Under torch.autocast a and b are cast as torch.matmul casts them, differentiably."""

from __future__ import annotations

import pytest
import torch
from helpers.cases import CASES, inputs

import codetta

LOW = [torch.bfloat16, torch.float16]


def autocast(dtype=None, **options):
    return torch.autocast(torch.get_default_device().type, dtype, **options)


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "low"), ("low", "float32"),
                                    ("float64", "float64")], ids=str)  # fmt: skip
def test_dtypes_follow_matmul(backend, low, dtypes):
    a, b = torch.randn(5, 8), torch.randn(8, 6)
    a, b = (
        x.to(low if d == "low" else getattr(torch, d)) for x, d in zip((a, b), dtypes, strict=True)
    )
    with autocast(low):
        ours, theirs = codetta.gemm(a, b), a @ b
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs)


def test_operands_are_not_cast_and_the_accumulator_stays_wide(backend):
    a, b, operands = inputs(CASES["arithmetic"], (5,), 4, 64, torch.float32)
    with autocast(torch.bfloat16):
        out = codetta.gemm(a, b, CASES["arithmetic"], **operands)
    by_hand = codetta.gemm(a.bfloat16(), b.bfloat16(), CASES["arithmetic"], **operands)
    assert out.x.dtype == torch.bfloat16
    assert torch.equal(out.x, by_hand.x)
    assert torch.equal(out.y, by_hand.y)


def test_gradients_come_back_in_the_dtype_of_the_parameters(backend):
    a, b, operands = inputs(CASES["arithmetic"], (5,), 4, 8, torch.float32)
    leaves = [a, b, *operands.values()]
    for x in leaves:
        x.requires_grad_()
    with autocast(torch.bfloat16):
        out = codetta.gemm(a, b, CASES["arithmetic"], **operands)
    (out.x.float().sum() + out.y.float().sum()).backward()
    assert all(x.grad.dtype == torch.float32 for x in leaves)
    low_a, low_b = (x.detach().bfloat16().requires_grad_() for x in (a, b))
    out = codetta.gemm(low_a, low_b, CASES["arithmetic"], **operands)
    (out.x.float().sum() + out.y.float().sum()).backward()
    assert torch.equal(a.grad, low_a.grad.float())
    assert torch.equal(b.grad, low_b.grad.float())


def test_a_backward_inside_of_autocast_is_the_same(backend):
    a, b, _ = inputs(CASES["silu"], (5,), 4, 8, torch.float32)
    a.requires_grad_(), b.requires_grad_()
    with autocast(torch.bfloat16):
        inside = torch.autograd.grad(codetta.gemm(a, b, CASES["silu"]).sum(), (a, b))
        out = codetta.gemm(a, b, CASES["silu"])
    outside = torch.autograd.grad(out.sum(), (a, b))
    assert all(torch.equal(x, y) for x, y in zip(inside, outside, strict=True))


def test_switched_off_autocast_casts_nothing(backend):
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with autocast(torch.bfloat16), autocast(enabled=False):
        assert codetta.gemm(a, b).dtype == torch.float32


def test_mixed_dtypes_without_autocast_are_refused_as_by_matmul():
    with pytest.raises(TypeError, match=r"bfloat16 and b has dtype torch.float32"):
        codetta.gemm(torch.ones(2, 3).bfloat16(), torch.ones(3, 4))
