from __future__ import annotations

import math

import pytest
import torch

from codetta.demo import judge
from codetta.demo.kernels import KernelRow

FP32, BF16 = torch.float32, torch.bfloat16
EPS = 2.0**-23


def test_fp32_losses_may_differ_by_a_ten_thousandth() -> None:
    good = judge.judge_losses(judge.losses_fp32([2.0, 1.0], [2.0001, 1.00009]), "off")
    bad = judge.judge_losses(judge.losses_fp32([2.0, 1.0], [2.0, 1.00011]), "off")
    assert good.passed and "every step within" in good.detail
    assert not bad.passed and "1 of 2 steps over" in bad.detail and "step 2" in bad.detail


def test_bf16_losses_may_be_twice_as_far_off_as_stock_and_a_hundredth() -> None:
    fp32, stock = [2.0, 2.0], [2.01, 1.99]
    assert judge.judge_losses(judge.losses_16bit(fp32, stock, [2.0299, 1.9701]), "off").passed
    assert not judge.judge_losses(judge.losses_16bit(fp32, stock, [2.0, 2.0301]), "off").passed


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_fails(value: float) -> None:
    assert not judge.judge_losses(judge.losses_fp32([2.0, 1.0], [2.0, value]), "off").passed
    assert not judge.judge_losses(judge.losses_fp32([2.0, value], [2.0, 1.0]), "off").passed
    spoilt = judge.losses_16bit([2.0, 2.0], [2.0, value], [2.0, value])
    assert not judge.judge_losses(spoilt, "off").passed


def test_the_gradient_budget_is_twice_the_stock_error_and_two_eps() -> None:
    (row,) = judge.gradients({"w": 8.0}, {"w": 1e-6}, {"w": 3e-6}, FP32)
    assert row.budget == pytest.approx(2e-6 + 2 * EPS * 8.0)
    assert row.passed and judge.judge_gradients([row]).passed


@pytest.mark.parametrize("error", [5e-6, math.nan, math.inf])
def test_a_gradient_over_budget_fails_and_is_named(error: float) -> None:
    norms, stock = {"v": 8.0, "w": 8.0}, {"v": 1e-6, "w": 1e-6}
    verdict = judge.judge_gradients(judge.gradients(norms, stock, {"v": 0.0, "w": error}, FP32))
    assert not verdict.passed
    assert "1 of 2 tensors over" in verdict.detail and "(w)" in verdict.detail


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_a_stock_gradient_that_is_no_number_excuses_nothing(error: float) -> None:
    rows = judge.gradients({"w": 8.0}, {"w": error}, {"w": error}, FP32)
    assert not judge.judge_gradients(rows).passed


def test_a_parameter_without_a_gradient_fails() -> None:
    rows = judge.gradients({"v": 8.0, "w": 8.0}, {"v": 1e-6, "w": 1e-6}, {"v": 0.0}, FP32)
    assert not judge.judge_gradients(rows).passed


def test_a_gradient_of_zeros_fails_in_bf16_too() -> None:
    """The error of an all-zero gradient is the whole norm."""
    rows = judge.gradients({"w": 8.0}, {"w": 8.0 * 0.05}, {"w": 8.0}, BF16)
    assert not judge.judge_gradients(rows).passed


def row(kind: str, moved: int, count: int = 1) -> KernelRow:
    return KernelRow(kind, "x", moved, count)


def test_kernels_must_agree_in_number_and_in_bytes() -> None:
    watched = [row("gemm", 10), row("gemm", 10), row("memory", 3)]
    assert judge.judge_kernels("x", watched, [row("gemm", 10, 2), row("memory", 3)]).passed
    for computed in ([row("gemm", 20), row("memory", 3)], [row("gemm", 10, 2), row("memory", 4)]):
        verdict = judge.judge_kernels("x", watched, computed)
        assert not verdict.passed and "computed" in verdict.detail


def test_attention_is_not_compared() -> None:
    watched, computed = [row("gemm", 1), row("attention", 5)], [row("gemm", 1)]
    assert judge.judge_kernels("x", watched, computed).passed


def test_seeing_no_kernel_is_no_agreement() -> None:
    verdict = judge.judge_kernels("x", [], [])
    assert not verdict.passed and "region:layers" in verdict.detail


def test_the_worst_of_several_failing_steps_is_named_and_not_the_first() -> None:
    rows = judge.losses_fp32([1.0, 1.0, 1.0], [1.0, 1.001, 1.01])
    assert "(step 3)" in judge.judge_losses(rows, "off").detail
    rows = judge.losses_fp32([1.0, 1.0, 1.0], [1.0, 1.01, float("nan")])
    assert "(step 3)" in judge.judge_losses(rows, "off").detail
