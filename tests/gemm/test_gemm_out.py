"""Writing into the caller's memory: out= and gemm_accumulate_."""

from __future__ import annotations

import pytest
import torch
from helpers.budget import within_budget
from helpers.cases import CASES, inputs
from helpers.values import LAYOUTS

import codetta
from codetta.errors import BadOut, OutNeedsNoGrad


def test_out_receives_the_result_and_is_returned():
    a, b, _ = inputs(CASES["silu"], (2, 3), 4, 5)
    out = torch.full((2, 3, 4), 7.0, dtype=torch.float64)
    assert codetta.gemm(a, b, CASES["silu"], out=out) is out
    assert torch.equal(out, codetta.gemm(a, b, CASES["silu"]))


def test_out_may_be_strided():
    a, b, _ = inputs(CASES["silu"], (3,), 4, 5)
    memory = torch.zeros(4, 6, dtype=torch.float64)
    codetta.gemm(a, b, out=memory[:, ::2].t())
    assert torch.equal(memory[:, ::2].t(), codetta.gemm(a, b))
    assert memory[:, 1::2].eq(0).all()


def test_out_is_a_dict_for_several_outputs():
    a, b, operands = inputs(CASES["rms"], (3,), 4, 5)
    out = {"r": torch.empty(3).double(), "x": torch.empty(3, 4).double()}
    result = codetta.gemm(a, b, CASES["rms"], out=out, **operands)
    expected = codetta.gemm(a, b, CASES["rms"], **operands)
    assert result.x is out["x"]
    assert result.r is out["r"]
    assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))


def test_a_single_named_output_takes_a_dict_or_a_tensor():
    a, b, _ = inputs(CASES["silu"], (3,), 4, 5)
    out = torch.empty(3, 4).double()
    assert codetta.gemm(a, b, CASES["silu"], out={"result": out}) is out


A, B = torch.ones(3, 5), torch.ones(5, 4)
MEMORY = torch.ones(64)
WRONG = {
    "shape": (torch.empty(4, 3), r"its shape is \(4, 3\), the result's is \(3, 4\)"),
    "dtype": (torch.empty(3, 4).double(), "its dtype is torch.float64"),
    "device": (torch.empty(3, 4, device="meta"), "its device is meta"),
    "expanded": (torch.empty(1, 4).expand(3, 4), "several elements share memory"),
    "name": ({"y": torch.empty(3, 4)}, "the outputs are result"),
    "list": ([torch.empty(3, 4)], "a list"),
}


@pytest.mark.parametrize("out, message", WRONG.values(), ids=WRONG)
def test_an_out_that_does_not_fit_is_refused(out, message):
    with pytest.raises(BadOut, match=message):
        codetta.gemm(A, B, out=out)


def test_an_out_that_shares_memory_with_an_input_is_refused_and_untouched():
    a, b, out = MEMORY[:15].view(3, 5), MEMORY[20:40].view(5, 4), MEMORY[10:22].view(3, 4)
    before = MEMORY.clone()
    with pytest.raises(BadOut, match="shares memory with a"):
        codetta.gemm(a, b, out=out)
    with pytest.raises(BadOut, match="shares memory with residual"):
        r = MEMORY[15:27].view(3, 4)
        codetta.gemm(A, B, CASES["residual"], residual=r, out=MEMORY[26:38].view(3, 4))
    assert torch.equal(MEMORY, before)


def test_neighbours_in_one_memory_do_not_overlap():
    memory = torch.ones(27)
    out = codetta.gemm(memory[:15].view(3, 5), B, out=memory[15:].view(3, 4))
    assert torch.equal(out, torch.full((3, 4), 5.0))


def test_two_outs_may_not_share_memory():
    memory = torch.empty(3, 5).double()
    a, b, operands = inputs(CASES["rms"], (3,), 4, 5)
    with pytest.raises(BadOut, match="shares memory with out 'x'"):
        out = {"x": memory[:, :4], "r": memory[:, 3]}
        codetta.gemm(a, b, CASES["rms"], out=out, **operands)


def test_partials_take_no_out():
    with pytest.raises(BadOut, match="raw=True"):
        codetta.gemm(A, B, raw=True, out=torch.empty(3, 4))


def test_out_has_no_gradient():
    with pytest.raises(OutNeedsNoGrad, match="b requires grad"):
        codetta.gemm(A, B.clone().requires_grad_(), out=torch.empty(3, 4))


# ------------------------------------------------------------------------- gemm_accumulate_
def test_a_product_is_added_in_place():
    target = torch.randn(3, 4)
    expected = target.double() + A.double() @ B.double()
    assert codetta.gemm_accumulate_(target, A, B) is target
    torch.testing.assert_close(target.double(), expected, rtol=1e-6, atol=1e-6)


def test_the_product_is_not_rounded_before_it_is_added():
    torch.manual_seed(0)
    a, b = torch.randn(8, 512).bfloat16(), torch.randn(512, 8).bfloat16()
    target = torch.zeros(8, 8)
    for _ in range(16):
        codetta.gemm_accumulate_(target, a, b)
    exact = 16 * (a.double() @ b.double())
    rounded = 16 * (a @ b).double()
    error = (target.double() - exact).norm()
    assert error <= 1e-6 * exact.norm()
    assert (rounded - exact).norm() > 100 * error


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("strides", ["plain", "transposed", "shifted"])
@pytest.mark.parametrize("shape", [(5, 3, 64), (130, 200, 24), (301, 203, 51)], ids=str)
def test_16_bit_products_are_added_to_any_target(backend, target_dtype, strides, shape):
    m, n, k = shape
    torch.manual_seed(0)
    place = LAYOUTS[strides]
    a, b = place(torch.randn(m, k).bfloat16()), place(torch.randn(k, n).bfloat16())
    target = place(torch.randn(m, n).to(target_dtype))
    exact = target.double() + a.double() @ b.double()
    eager = target + a @ b
    addends = target.double().abs() + a.double().abs() @ b.double().abs()
    first, again = (codetta.gemm_accumulate_(place(target.clone()), a, b) for _ in range(2))
    within_budget("target", first, exact, eager, addends)
    assert torch.equal(first, again)


def test_a_low_target_is_rounded_once():
    a, b = torch.randn(5, 64), torch.randn(64, 3)
    target = torch.randn(5, 3).bfloat16()
    expected = torch.addmm(target.float(), a, b).bfloat16()
    assert torch.equal(codetta.gemm_accumulate_(target.clone(), a, b), expected)


def test_the_version_of_the_target_counts_the_write():
    x = torch.ones(3, 4, requires_grad=True)
    target = torch.ones(3, 4)
    y = (x * target).sum()  # saves target
    codetta.gemm_accumulate_(target, A, B)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_accumulation_refuses_what_it_cannot_do():
    target = torch.zeros(3, 4)
    with pytest.raises(OutNeedsNoGrad, match="a requires grad"):
        codetta.gemm_accumulate_(target, A.clone().requires_grad_(), B)
    with pytest.raises(BadOut, match="shares memory with a"):
        square = torch.ones(3, 3)
        codetta.gemm_accumulate_(square, square, torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"target has shape \(4, 3\); expected \(3, 4\)"):
        codetta.gemm_accumulate_(torch.zeros(4, 3), A, B)
    with pytest.raises(TypeError, match=r"target has dtype torch.int64"):
        codetta.gemm_accumulate_(torch.zeros(3, 4, dtype=torch.long), A, B)
    with pytest.raises(ValueError, match=r"expected \(M, K\)"):
        codetta.gemm_accumulate_(target, A[None], B)
