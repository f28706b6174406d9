"""The loss head's two kernels of numbers per row, against their definitions in loss/shifted.py."""

from __future__ import annotations

import math

import pytest
import torch
from triton_runner import DEVICE, TOLERANCE

from codetta.backends.cuda import triton_shift
from codetta.loss import shifted
from codetta.loss.head import Head, Leaves
from codetta.loss.options import Logits, Options
from codetta.loss.vocabulary import WHOLE

M, D, V = 7, 1100, 203  # more than one step of the dot product, and not a multiple of it
BOTH = pytest.mark.parametrize("vectors", [False, True], ids=["plain", "bias and row scale"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def head(dtype: torch.dtype, vectors: bool, v: int = V, indices: torch.dtype = torch.long) -> Head:
    torch.manual_seed(0)
    x, weight = torch.randn(M, D) / 8, torch.randn(v, D) / 8
    bias = torch.randn(v).to(DEVICE) if vectors else None
    rows = (torch.rand(M) + 0.5).to(DEVICE) if vectors else None
    target = torch.randint(0, v, (M,))
    target[2], target[4], target[5] = -100, v, v - 1
    leaves = Leaves(x.to(DEVICE, dtype), weight.to(DEVICE, dtype), bias, None, rows)
    options = Options(Logits(vectors, 0.9 if vectors else 1.0, 0.0, vectors))
    return Head(leaves, target.to(DEVICE, indices), options, WHOLE)


def shift(part: Head, sampled: torch.Tensor, step: int) -> torch.Tensor:
    return triton_shift.shift(
        part.x, part.weight, part.bias, part.leaves.row_scale, part.options.logits.scale,
        part.target, sampled, step, shifted.FLOOR,
    )  # fmt: skip


def samples(part: Head, columns: int = shifted.SAMPLED) -> tuple[torch.Tensor, int]:
    step = max(1, len(part.weight) // columns)
    return part.x @ part.weight[: step * columns : step].t(), step


def near(found: torch.Tensor, wanted: torch.Tensor, slack: float) -> None:
    assert torch.allclose(found, wanted, rtol=slack, atol=slack, equal_nan=True), (found, wanted)


@DTYPES
@BOTH
@pytest.mark.parametrize("v", [1, 7, V])
def test_the_shift_is_the_largest_of_target_and_samples(dtype, vectors, v):
    part = head(dtype, vectors, v)
    sampled, step = samples(part)
    # The definition rounds the factors of the dot product to the dtype of x, the kernel does not.
    slack = torch.finfo(dtype).eps + TOLERANCE
    near(shift(part, sampled, step), shifted.based(part, sampled, step), slack)


@BOTH
def test_the_targets_logit_is_a_bound_where_no_sample_is_larger(vectors):
    """With a column that is never sampled far above all others, the shift is that of the target."""
    part = head(torch.float32, vectors)
    column = 1
    part.weight[column] = 4 * part.x[0] / part.x[0].norm()
    part.target.fill_(column)
    sampled, step = samples(part, columns=3)
    z = part.x @ part.weight.t()
    if vectors:
        z = 0.9 * (z * part.leaves.row_scale[:, None] + part.bias)
    found = shift(part, sampled, step)
    assert found[0] > z[0, ::step][:3].amax() + 1
    near(found[0], z[0, column], 1e-4)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["sample", "target", "everywhere"])
def test_values_that_are_not_finite_give_what_the_definition_gives(value, where):
    part = head(torch.float32, True)
    sampled, step = samples(part)
    if where == "target":
        part.bias[part.target[0]] = value
    elif where == "sample":
        part.bias[2 * step] = value
    else:
        part.bias.fill_(value)
    found = shift(part, sampled, step)
    near(found, shifted.based(part, sampled, step), 1e-4)
    if value == -math.inf:
        assert found.isfinite().all()
        assert where != "everywhere" or (found == shifted.FLOOR).all()
    else:
        assert not found[0 if where == "target" else slice(None)].isfinite().any()


def test_rows_that_are_not_contiguous():
    part = head(torch.bfloat16, False)
    sampled, step = samples(part)
    expected = shift(part, sampled, step)
    wide_x = torch.empty(M, D + 9, dtype=torch.bfloat16, device=DEVICE)[:, 1 : D + 1].copy_(part.x)
    wide_w = torch.empty(D, V, dtype=torch.bfloat16, device=DEVICE).t().copy_(part.weight)
    leaves = Leaves(wide_x, wide_w, None, None, None)
    made = shift(Head(leaves, part.target, part.options, WHOLE), sampled, step)
    assert torch.equal(made, expected)


@DTYPES
@BOTH
@pytest.mark.parametrize("indices", [torch.long, torch.int32])
def test_lse_factor_and_the_targets_element(dtype, vectors, indices):
    part = head(dtype, vectors, indices=indices)
    z = torch.randn(M, V).to(DEVICE)
    base = torch.tensor([0.0, 3.0, -2.0, 0.5, 1.0, -60.0, 2.0]).to(DEVICE)
    e = torch.exp(z - base[:, None])
    total, logit = e.sum(1), torch.zeros(M, device=DEVICE)
    total[3] = 2.0**126  # whose reciprocal is not a normal number
    inside = (part.target >= 0) & (part.target < V)
    logit[inside] = z[inside, part.target[inside].long()]
    scale = torch.rand(M).to(DEVICE)
    scale[1] = 0.0
    expected = e.to(dtype, copy=True)
    lse, factor = shifted.settled(part, expected, base, total, logit, scale)
    whole = torch.zeros(M, V + 5, dtype=dtype, device=DEVICE)
    pitched = whole[:, :V].copy_(e)
    kept = whole.clone()
    made = triton_shift.settle(
        pitched, part.target, base, total, logit, scale, part.leaves.row_scale,
        part.options.logits.scale,
    )  # fmt: skip
    near(made[0], lse, 1e-5)
    near(made[1] / factor.clamp_min(1e-45), factor / factor.clamp_min(1e-45), 1e-5)
    assert made[1][3] > 0 and made[1][1] == 0
    near(pitched.float(), expected.float(), torch.finfo(dtype).eps)
    changed = (whole != kept).sum(1)
    assert torch.equal(changed, inside.long()), "one element of each row that has a target"


def test_an_infinite_shift_is_the_lse():
    part = head(torch.float32, False)
    base = torch.full((M,), math.inf, device=DEVICE)
    total = torch.full((M,), math.nan, device=DEVICE)
    e, zeros = torch.zeros(M, V, device=DEVICE), torch.zeros(M, device=DEVICE)
    lse, _ = triton_shift.settle(e, part.target, base, total, zeros, zeros, None, 1.0)
    assert (lse == math.inf).all()


def test_a_program_of_settle_takes_more_than_one_block():
    m = 2 * triton_shift._BLOCK + 3
    torch.manual_seed(1)
    e = torch.rand(m, 5).to(DEVICE)
    target = torch.randint(0, 5, (m,)).to(DEVICE)
    base, total, logit, scale = (torch.rand(m).to(DEVICE) + 0.5 for _ in range(4))
    wanted = e.clone()
    wanted[torch.arange(m), target] = torch.exp(logit - base) - total
    lse, factor = triton_shift.settle(e, target, base, total, logit, scale, None, 2.0)
    near(lse, base + total.log(), 1e-5)
    near(factor, 2.0 * scale / total, 1e-5)
    near(e, wanted, 1e-5)
