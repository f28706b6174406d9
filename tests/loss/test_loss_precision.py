"""Rounding: the error budget in every dtype, and what breaks it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.budget import norm, within_budget
from helpers.mutation import fails_when_broken
from loss_oracle import head, reference
from torch.utils._python_dispatch import TorchDispatchMode

import codetta
from codetta.loss import engine
from codetta.loss.head import Head
from codetta.loss.sums import Sums
from codetta.ops import run_gemm_short_sum_

SCHEDULES = ("forward", "recompute")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPTIONS = (
    {},
    {"label_smoothing": 0.2, "z_loss": 1e-2},
    {"softcap": 5.0, "logit_scale": 0.5},
    {"reduction": "sum"},
)
SIZE = {"d": 32, "v": 150}


def values(function, dtype, options, m=37, spread=0.2, upstream=1.0):
    """Loss and gradients of a head in ``dtype``."""
    x, weight, target, bias = head(m, dtype=dtype, spread=spread, **SIZE)
    made = function(x, weight, target, bias=bias, **options)
    loss = made[0] if isinstance(made, tuple) else made
    return [loss.detach(), *torch.autograd.grad(loss * upstream, (x, weight, bias))]


def exact(dtype, options, **more):
    """What fp64 makes of the rounded tensors."""

    def rounded(x, weight, target, bias, **o):
        leaves = [t.to(dtype).double() for t in (x, weight, bias)]
        return reference(*leaves[:2], target, bias=leaves[2], **o)

    return values(rounded, torch.float64, options, **more)


def judge(dtype, options, schedule, chunk=16, **more):
    ours = {"schedule": schedule, "chunk": chunk}
    got = values(codetta.linear_cross_entropy, dtype, {**options, **ours}, **more)
    eager = values(reference, dtype, options, **more)
    names = ("loss", "dx", "dW", "dbias")
    for name, *three in zip(names, got, exact(dtype, options, **more), eager, strict=True):
        within_budget(name, *three)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_errors_stay_within_the_budget(backend, dtype, options, schedule):
    judge(dtype, options, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_confident_predictions_keep_their_gradients(backend, dtype, schedule):
    """Where p is near 1 the gradient is p - 1, of which a rounded logit would leave nothing."""
    judge(dtype, {}, schedule, spread=2.0, upstream=64.0)


def test_gradients_of_fp16_survive_a_loss_scale(backend):
    """1 / M times a probability is no number of fp16; times the scale it is."""
    options = {"num_items_in_batch": 2**22}
    got = values(codetta.linear_cross_entropy, torch.float16, options, upstream=2.0**20)
    eager = values(reference, torch.float16, options, upstream=2.0**20)
    for name, *three in zip(
        ("loss", "dx", "dW"), got, exact(torch.float16, options, upstream=2.0**20), eager,
        strict=False,
    ):  # fmt: skip
        within_budget(name, *three)


def test_the_weight_gradient_is_summed_with_more_digits(backend):
    """Over many chunks the error is that of one rounding; a bf16 sum would have grown past it."""
    x, weight, target, _ = head(512, dtype=torch.bfloat16, spread=0.1, ignored=0, **SIZE)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    (expected,) = torch.autograd.grad(reference(*wide, target, reduction="sum")[0], wide[1])
    errors = {}
    for chunk in (8, 512):
        loss = codetta.linear_cross_entropy(
            x, weight, target, reduction="sum", schedule="forward", chunk=chunk
        )
        (got,) = torch.autograd.grad(loss, weight)
        errors[chunk] = norm(got.double() - expected)
    assert errors[8] <= 1.05 * errors[512]


def test_that_many_bf16_additions_would_show():
    """The size of the error that the test above would find."""
    total, exact = torch.zeros(1000, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.float64)
    for _ in range(64):
        part = torch.randn(1000)
        total += part.bfloat16()
        exact += part
    once = norm(exact.bfloat16().double() - exact)
    assert norm(total.double() - exact) > 2 * once


# --------------------------------------------------------------------- sums in 24 and 20 bits
BF16 = torch.bfloat16
#: Five chunks, which are summed in 20 bits; more than nine are in 24. No fp32 sum fits.
SHORT = {"schedule": "forward", "chunk": 128, "memory_limit": 1}
WIDE = SHORT | {"accum_dtype": torch.float32}


def gradients(function, dtype=BF16, spread=0.125, upstream=1.0, **options):
    """dx and dW of logits with a standard deviation of 1."""
    x, weight, target, _ = head(640, d=64, v=331, dtype=BF16, spread=spread, ignored=1 / 16)
    leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
    made = function(*leaves, target, **options)
    loss = made[0] if isinstance(made, tuple) else made
    return torch.autograd.grad(loss.sum() * upstream, leaves)


def errors_of_dw(chunk):
    """Relative, of a short sum and of an fp32 one."""
    exact = gradients(reference, torch.float64)[1]
    found = [
        gradients(codetta.linear_cross_entropy, **o | {"chunk": chunk})[1] for o in (SHORT, WIDE)
    ]
    assert not torch.equal(*found)
    return [float(norm(g.double() - exact) / norm(exact)) for g in found]


@pytest.mark.parametrize("chunk", [320, 128, 43, 8])
def test_a_short_sum_of_dw_is_as_exact_as_one_in_fp32(backend, chunk):
    """By the count of roundings (codetta.loss.plan), of 2, 5, 15 and 80 chunks."""
    exact = gradients(reference, torch.float64)
    eager = gradients(reference)
    found = gradients(codetta.linear_cross_entropy, **SHORT | {"chunk": chunk})
    for name, *three in zip(("dx", "dW"), found, exact, eager, strict=True):
        within_budget(name, *three)
    error, least = errors_of_dw(chunk)
    assert error < 1.02 * least


def _bf16_alone(high, low, a, b, bits, *, first, last):
    high.copy_(a.float() @ b.float() + (0.0 if first else high.float()))


def _forgetful(high, low, a, b, bits, *, first, last):
    run_gemm_short_sum_(
        high, low if first else torch.zeros_like(low), a, b, bits, first=first, last=last
    )


def _never_rounded(high, low, a, b, bits, *, first, last):
    run_gemm_short_sum_(high, low, a, b, bits, first=first, last=False)


def _last_chunk_only(high, low, a, b, bits, *, first, last):
    run_gemm_short_sum_(high, low, a, b, bits, first=True, last=last)


@pytest.mark.parametrize("chunk", [43, 128], ids=["24 bits", "20 bits"])
@pytest.mark.parametrize("broken", [_bf16_alone, _forgetful, _never_rounded, _last_chunk_only])
def test_the_bound_of_short_sums_finds(broken, chunk, monkeypatch):
    """Sums of 16 bits, lower bits that are lost, a gradient cut off instead of rounded."""
    error, least = errors_of_dw(chunk)
    assert error < 1.02 * least
    monkeypatch.setattr("codetta.loss.sums.run_gemm_short_sum_", broken)
    error, least = errors_of_dw(chunk)
    assert error > 1.05 * least


@pytest.mark.parametrize(("tokens", "theirs"), [(960, 3.85e-3), (1024, 1.68e-3)])
def test_the_errors_that_the_page_compares(tokens, theirs):
    """PyTorch rounds 1 / tokens to bf16: 1 / 960, like 1 / 15360, by 3.4e-3, 1 / 1024 by 0."""
    x, weight, target, _ = head(1100, d=64, v=4096, dtype=BF16, spread=0.125, ignored=0)
    target[tokens:] = -100

    def dw(function, dtype=BF16, **options):
        w = weight.detach().to(dtype).requires_grad_()
        made = function(x.detach().to(dtype), w, target, **options)
        return torch.autograd.grad(made[0] if isinstance(made, tuple) else made, w)[0].double()

    exact = dw(reference, torch.float64)
    for found, expected in (
        (dw(reference), theirs),
        (dw(codetta.linear_cross_entropy, **WIDE | {"chunk": 220}), 2.88e-3),
        (dw(codetta.linear_cross_entropy, **SHORT | {"chunk": 220}), 2.88e-3),
    ):
        assert norm(found - exact) / norm(exact) == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize(
    "options",
    [{"chunk": 640}, {"schedule": "recompute"}, {"schedule": "recompute", "chunk": None},
     {"schedule": None, "reduction": "none"}],
    ids=lambda o: "-".join(f"{k}_{v}" for k, v in o.items()),
)  # fmt: skip
def test_where_no_sum_is_short_both_are_the_same(options):
    """One chunk, and schedules that compute the logits again."""
    plain, wide = (
        gradients(codetta.linear_cross_entropy, **{**o, **options}) for o in (SHORT, WIDE)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, wide, strict=True))


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}])
def test_sums_of_stored_logits_are_short_too(options):
    plain, wide = (
        gradients(codetta.linear_cross_entropy, **o, **options)[1] for o in (SHORT, WIDE)
    )
    assert not torch.equal(plain, wide) and norm((plain - wide).float()) < 1e-3 * norm(wide.float())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_budget_finds_broken_kernels(schedule):
    fails_when_broken(lambda: judge(torch.bfloat16, {}, schedule))
    if schedule == "forward":
        fails_when_broken(lambda: judge(torch.bfloat16, {}, schedule), ops=("pointwise",))


def _no_smoothing(monkeypatch):
    made = engine._masses

    def without(head, lse, scale, lse_gradient):
        masses = made(head, lse, scale, lse_gradient)
        return (masses[0], scale, 0.0 * scale)

    monkeypatch.setattr(engine, "_masses", without)


def _no_z_loss(monkeypatch):
    made = engine._masses

    def without(head, *rest):
        options = dataclasses.replace(head.options, z_loss=0.0)
        return made(dataclasses.replace(head, options=options), *rest)

    monkeypatch.setattr(engine, "_masses", without)


def _wrong_divisor(monkeypatch):
    made = engine.forward

    def wrong(head, scale, plan, need):
        return made(head, scale * len(scale) / (len(scale) - 1), plan, need)

    monkeypatch.setattr("codetta.loss.engine.forward", wrong)


def _lse_of_unrounded_logits(monkeypatch):
    made = engine.statistics

    def exact(*arguments):
        return made(*arguments[:-1], "exact" if arguments[-1] else "")

    monkeypatch.setattr(engine, "statistics", exact)


def _target_of_the_neighbour(monkeypatch):
    made = Head.rows

    def shifted(self, start, stop):
        part = made(self, start, stop)
        return dataclasses.replace(part, target=part.target.roll(1))

    monkeypatch.setattr(Head, "rows", shifted)


def _last_chunk_dropped(monkeypatch):
    made = Sums.add

    def dropped(self, part, start, dz, *rest):
        made(self, part, start, dz if start < 32 else torch.zeros_like(dz), *rest)

    monkeypatch.setattr(Sums, "add", dropped)


@pytest.mark.parametrize(
    "mutate",
    [_no_smoothing, _no_z_loss, _wrong_divisor, _target_of_the_neighbour, _last_chunk_dropped],
)
def test_the_budget_finds_wrong_formulas(mutate, monkeypatch):
    judge(torch.float32, OPTIONS[1], "forward")
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        judge(torch.float32, OPTIONS[1], "forward")


def test_the_budget_finds_the_wrong_log_sum_exp(monkeypatch):
    judge(torch.bfloat16, {}, "forward", spread=2.0, upstream=64.0)
    _lse_of_unrounded_logits(monkeypatch)
    with pytest.raises(AssertionError):
        judge(torch.bfloat16, {}, "forward", spread=2.0, upstream=64.0)


class Sizes(TorchDispatchMode):
    """Number of elements of the largest result of any operator."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return out


@pytest.mark.parametrize(
    ("schedule", "reduction"), [("forward", "mean"), ("recompute", "mean"), ("recompute", "none")]
)
def test_no_more_than_a_chunk_of_logits_is_ever_alive(schedule, reduction):
    m, chunk = 256, 16
    x, weight, target, bias = head(m, d=4, v=300, dtype=torch.bfloat16)
    # What runs inside the operators too: the kernels of the reference are plain PyTorch.
    with codetta.use_backend("reference"), Sizes() as sizes:
        loss = codetta.linear_cross_entropy(
            x, weight, target, bias=bias, reduction=reduction, schedule=schedule, chunk=chunk,
            label_smoothing=0.1, return_lse=True, return_accuracy=True,
        ).loss  # fmt: skip
        loss.sum().backward()
    assert chunk * 300 <= sizes.largest <= 2 * chunk * 300 < m * 300 / 4
