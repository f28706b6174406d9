"""Where a careless form of the same mathematics loses its digits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from program_oracle import run

from codetta import programs

M, D, N = 64, 256, 48


def layernorm_setting(ratio, dtype):
    """x with |mean| / standard deviation near `ratio` in every row, and a LayerNorm with Linear."""
    generator = torch.Generator().manual_seed(int(ratio))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x = (normal(M, D) + ratio * torch.sign(normal(M, 1))).to(dtype)
    gamma, beta = (1 + 0.1 * normal(D)).to(dtype), normal(D).to(dtype)
    return x, gamma, beta, (normal(N, D) / D**0.5).to(dtype), normal(N).to(dtype)


def link(x, gamma, beta, w, b, *, s_of_rounded=True):
    """LayerNorm and Linear by the programs; also the absolute addends of the last expression."""
    stats = run(programs.row_layernorm(1e-5), None, shape=x.shape, dtype=x.dtype, x=x)
    product = w.float() * gamma.float()
    folded = product.to(x.dtype)
    s = (folded.float() if s_of_rounded else product).sum(1)
    t = (w.double() @ beta.double() + b.double()).float()
    acc = x.float() @ folded.float().T
    operands = {"r": stats.r, "mean": stats.mean, "s": s, "t": t}
    result = run(programs.layernorm_apply, acc, dtype=x.dtype, **operands).result
    r, mean = stats.r[:, None], stats.mean[:, None]
    return result, (r * acc).abs() + (r * mean * s).abs() + t.abs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ratio", [10.0, 100.0, 1000.0])
def test_layernorm_link_within_the_budget_at_a_large_mean(ratio, dtype):
    setting = layernorm_setting(ratio, dtype)
    x, gamma, beta, w, b = (t.double() for t in setting)
    exact = F.linear(F.layer_norm(x, (D,), gamma, beta), w, b)
    x, gamma, beta, w, b = setting
    plain = F.linear(F.layer_norm(x, (D,), gamma, beta), w, b).double()
    ours, addends = link(*setting)
    allowed = 2 * (plain - exact).norm() + 2 * torch.finfo(dtype).eps * addends.norm()
    assert (ours.double() - exact).norm() <= allowed


def test_s_of_the_unrounded_product_is_far_worse():
    setting = layernorm_setting(100.0, torch.bfloat16)
    x, gamma, beta, w, b = (t.double() for t in setting)
    exact = F.linear(F.layer_norm(x, (D,), gamma, beta), w, b)
    right = (link(*setting)[0].double() - exact).norm()
    wrong = (link(*setting, s_of_rounded=False)[0].double() - exact).norm()
    assert wrong > 5 * right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ratio", [10.0, 100.0, 1000.0])
def test_statistics_are_exact_to_rounding_at_a_large_mean(ratio, dtype):
    x = layernorm_setting(ratio, dtype)[0]
    ours = run(programs.row_layernorm(1e-5), None, tile=(8, 32), shape=x.shape, dtype=dtype, x=x)
    exact = 1 / (x.double().var(1, correction=0) + 1e-5).sqrt()
    # A few roundings, and what rounding each tile's mean costs; sums of x and x² lose ratio² eps.
    allowed = torch.finfo(torch.float32).eps * (8 + ratio / 4)
    assert ((ours.r.double() - exact) / exact).abs().max() <= allowed
    assert (ours.mean.double() - x.double().mean(1)).abs().max() <= ratio * 2**-22


def test_sum_of_squares_is_of_x_as_stored():
    acc, residual = torch.randn(M, D), torch.randn(M, D).bfloat16()
    out = run(programs.residual_ssq, acc, dtype=torch.bfloat16, residual=residual)
    stored = out.x.double().pow(2).sum(1)
    unrounded = (acc.double() + residual.double()).pow(2).sum(1)
    error = (out.ssq.double() - stored).abs().max()
    assert error <= 1e-5 * stored.max()
    assert error < 0.1 * (unrounded - stored).abs().max()


def test_fp16_gradient_flushes_with_r_in_the_store_and_not_without():
    """A loud residual stream has a small r; r ⊙ dz then falls below fp16's smallest number."""
    x = (3e3 * torch.randn(M, D)).half()
    w, z = torch.randn(N, D).half() / D**0.5, torch.randn(M, N).half()
    gamma, zero = torch.ones(D), torch.zeros(M, D).half()
    dy = 1e-5 * torch.randn(M, N // 2)
    r = run(programs.row_rms(1e-6), None, shape=(M, D), dtype=torch.float16, x=x).r
    scaled = run(programs.swiglu_backward, dy, dtype=torch.float16, z=z, r=r)
    kept = run(programs.swiglu_backward_unscaled, dy, dtype=torch.float16, z=z)
    assert (scaled.dz == 0).float().mean() > 0.9
    assert (kept.dz == 0).float().mean() < 0.1
    wide = run(programs.swiglu_backward, dy.double(), z=z.double(), r=r.double())
    shared = {"gamma": gamma, "dres": zero, "x": x, "c": torch.zeros(M)}
    normalized = x.double() * r.double()[:, None]
    exact = wide.dz.T @ x.double()
    # The weight gradient takes the normalized x instead, which is of order 1.
    ours = (kept.dz.float().T @ normalized.half().float()).double()
    assert (ours - exact).norm() <= 0.02 * exact.norm()
    assert ((scaled.dz.float().T @ x.float()).double() - exact).norm() > 0.5 * exact.norm()
    dx = run(
        programs.rms_link_dgrad_unscaled, kept.dz.float() @ w.float(), dtype=torch.float16,
        r=1000 * r, **shared,
    ).dx  # fmt: skip
    expected = 1000 * (wide.dz @ w.double())
    assert (dx.double() - expected).norm() <= 0.05 * expected.norm()
