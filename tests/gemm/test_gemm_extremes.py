"""Infinities, NaN and large means behave as in PyTorch, however the tiles fall."""

from __future__ import annotations

import pytest
import torch
from helpers.cases import CASES

import codetta
from codetta.language import (
    Col,
    Index,
    epilogue,
    exp,
    logsumexp,
    moments,
    rowmax,
    rowsum,
    select,
)

INF, NAN = float("inf"), float("nan")
TILES = [None, (1, 1), (2, 3), (100, 100)]  # None is the backend's own
DTYPES = [torch.float32, torch.bfloat16]


def through_gemm(z, program, tile, **operands):
    """The program applied to z itself: the accumulator is 1 z."""
    return codetta.gemm(torch.eye(len(z), dtype=z.dtype), z, program, tile=tile, **operands)


def loss_of(acc, target: Index):
    lse, mean = logsumexp(acc, acc)
    return {"lse": lse, "mean": mean, "logit": select(acc, target), "m": rowmax(acc)}


LOSS = epilogue(loss_of)

# A row per way in which a softmax can go wrong.
ROWS = {
    "plain": [1.0, -2.0, 0.5, 3.0],
    "large": [1e30, 1e30, -1e30, 0.0],
    "far": [0.0, -1e4, 1e4, 3.0],
    "one -inf": [-INF, 0.0, 1.0, 2.0],
    "all but one -inf": [-INF, -INF, 5.0, -INF],
    "all -inf": [-INF, -INF, -INF, -INF],
    "inf": [INF, 0.0, 1.0, -INF],
    "nan": [0.0, NAN, 1.0, 2.0],
    "nan and inf": [INF, NAN, 1.0, -INF],
}


def row(x, program, tile, **operands):
    a = torch.ones(1, 1, dtype=x.dtype)
    return codetta.gemm(a, x, program, tile=tile, **operands)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("values", ROWS.values(), ids=ROWS)
def test_log_sum_exp_and_maximum_are_those_of_torch(backend, values, tile, dtype):
    x = torch.tensor([values], dtype=dtype)
    out = row(x, LOSS, tile, target=torch.tensor([2]))
    x = x.float()
    torch.testing.assert_close(out.lse, torch.logsumexp(x, 1), equal_nan=True)
    torch.testing.assert_close(out.m, x.amax(1), equal_nan=True)
    torch.testing.assert_close(out.logit, x[:, 2], equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("values", ["plain", "far", "one -inf", "all but one -inf"])
def test_an_excluded_column_has_no_weight(backend, values, tile, dtype):
    """-inf logits have probability 0, and 0 times an infinite payload counts 0."""
    x = torch.tensor([ROWS[values]], dtype=dtype)
    p = torch.softmax(x.double(), 1)
    expected = torch.where(p == 0, 0.0, p * x.double()).sum(1)
    out = row(x, LOSS, tile, target=torch.tensor([0]))
    torch.testing.assert_close(out.mean.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", [-1, 4, 7, -100, 2**40])
def test_a_target_outside_of_the_columns_selects_zero(backend, target, dtype):
    x = torch.tensor([ROWS["plain"]], dtype=dtype)
    for tile in TILES:
        out = row(x, LOSS, tile, target=torch.tensor([target]))
        assert out.logit.item() == 0.0


def picked_of(acc, target: Index, shift: Col):
    return {"logit": select(acc, target), "after": select(exp(acc) + shift, target)}


PICKED = epilogue(picked_of)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("target", [4, 5, 7, 127, 128, 2**31 - 1, -1])
def test_what_lies_beyond_the_columns_of_a_tile_is_not_selected(backend, target, dtype):
    """Beyond them the accumulator is a row of a times zeros: NaN where that row is infinite."""
    a = torch.tensor([[INF], [-INF], [NAN], [1.0]], dtype=torch.bfloat16)
    b = torch.tensor([ROWS["plain"]], dtype=torch.bfloat16)
    index = torch.full((4,), target, dtype=dtype)
    out = codetta.gemm(a, b, PICKED, target=index, shift=torch.full((4,), 3.0))
    assert out.logit.tolist() == out.after.tolist() == [0.0] * 4
    inside = codetta.gemm(a, b, PICKED, target=index.fill_(3), shift=torch.full((4,), 3.0))
    assert inside.logit[:2].tolist() == [INF, -INF] and inside.logit[2].isnan()
    assert inside.logit[3] == 3.0
    assert inside.after[1] == 3.0


def statistics_of(acc):
    mean, variance = moments(acc)
    return {"mean": mean, "variance": variance}


STATISTICS = epilogue(statistics_of)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("ratio", [0.0, 1e3, 1e5])
def test_a_large_mean_costs_no_digits_of_the_variance(backend, ratio, tile, dtype):
    """Sums of x and x² lose all digits of a variance at mean / sigma = 1000 in fp32."""
    torch.manual_seed(0)
    # bf16 has 8 bits: sigma is as far below the mean as they allow.
    spread = 1.0 if dtype is torch.float32 else max(1.0, ratio / 8)
    x = (spread * torch.randn(6, 97) + ratio).to(dtype)
    out = through_gemm(x, STATISTICS, tile)
    x = x.float()
    exact = x.double().var(1, unbiased=False)
    theirs = x.var(1, unbiased=False).double()
    error = (out.variance.double() - exact).norm()
    # Rounding x to fp32 alone moves the variance by eps |x| sigma.
    addends = exact.norm() + (x.double().mean(1).abs() * exact.sqrt()).norm()
    eps = torch.finfo(torch.float32).eps
    assert error <= 2 * (theirs - exact).norm() + 2 * eps * addends
    naive = ((x * x).mean(1) - x.mean(1) ** 2).double()
    if ratio >= 1e3 and dtype is torch.float32:
        assert (naive - exact).norm() > 100 * error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", [None, (2, 4), (4, 32)], ids=str)
@pytest.mark.parametrize("size", [2.0**66, 2.0**100])
def test_a_variance_that_overflows_is_infinite_and_not_nan(backend, size, tile, dtype):
    torch.manual_seed(0)
    x = (size * (2 + torch.randn(5, 97))).to(dtype)
    x[3] = size  # equal columns have no variance, however large they are
    out = through_gemm(x, STATISTICS, tile)
    torch.testing.assert_close(out.mean.double(), x.double().mean(1), rtol=1e-5, atol=0.0)
    assert out.variance.tolist() == [INF, INF, INF, 0.0, INF]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("values", ["nan", "inf", "nan and inf", "all -inf"])
def test_sums_and_moments_of_non_finite_rows_are_those_of_torch(backend, values, dtype):
    given = torch.tensor([ROWS[values]], dtype=dtype)
    x = given.float()
    total = epilogue(_row_total)
    for tile in TILES:
        torch.testing.assert_close(row(given, total, tile), x.sum(1), equal_nan=True)
        out = row(given, STATISTICS, tile)
        torch.testing.assert_close(out.mean, x.mean(1), equal_nan=True)
        assert out.variance.isnan().all()


def _row_total(acc):
    return rowsum(acc)


MAPS = {
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "abs": torch.abs,
    "silu": lambda x: x * torch.sigmoid(x),
    "neg": lambda x: -2 * x,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_nan_and_inf_pass_through_maps(backend, name, dtype):
    x = torch.tensor([[NAN, INF, -INF, 0.0, 1.0]], dtype=dtype)
    ours = row(x, CASES[name], None)
    torch.testing.assert_close(ours, MAPS[name](x.float()).to(dtype), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_of_the_last_tile_does_not_count(backend, dtype):
    """All columns negative: a zero of the padding would be the maximum, or an addend of the sum."""
    x = torch.full((3, 7), -5.0, dtype=dtype)
    for tile in (None, (2, 4), (2, 6), (100, 100)):
        out = through_gemm(x, LOSS, tile, target=torch.zeros(3, dtype=torch.long))
        assert torch.equal(out.m, x[:, 0].float())
        torch.testing.assert_close(out.lse, torch.logsumexp(x.float(), 1))


def test_the_gradient_of_a_maximum_is_shared_by_ties(wide_backend):
    z = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], requires_grad=True)
    program = CASES["row_maximum"]
    codetta.gemm(torch.eye(2), z, program, w=torch.ones(3)).m.sum().backward()
    expected = torch.tensor([[0.0, 0.5, 0.5], [1 / 3, 1 / 3, 1 / 3]])
    torch.testing.assert_close(z.grad, expected)
