"""Shifted exponentials: rows that overflow are computed again, and what takes another form."""

from __future__ import annotations

import math

import pytest
import torch
from loss_oracle import close

import codetta
from codetta.loss import shifted
from codetta.loss.head import Head, Leaves
from codetta.loss.options import Logits, Options
from codetta.loss.vocabulary import WHOLE

M, D, V = 9, 16, 203
F64 = torch.float64


def leaves(scale: float = 1.0, dtype: torch.dtype = F64) -> tuple[torch.Tensor, ...]:
    """x, weight, bias, target; the logits of the even rows are ``scale`` times as large."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(M, D), torch.randn(V, D), torch.randn(V)
    x[::2] *= scale
    target = torch.randint(0, V, (M,))
    target[3] = -100
    return *(t.to(dtype).requires_grad_() for t in (x, weight, bias)), target


def both(x, weight, target, **options):
    """Loss and gradients of codetta's schedule 'forward', and PyTorch's."""
    found = codetta.linear_cross_entropy(x, weight, target, schedule="forward", chunk=4, **options)
    stock = torch.nn.functional.cross_entropy(x @ weight.t(), target)
    return [(loss, *torch.autograd.grad(loss, (x, weight))) for loss in (found, stock)]


@pytest.fixture
def forms(monkeypatch):
    """How often the shifted form ran, and how many rows it computed again."""
    seen = {"chunks": 0, "rows": 0}
    chunk, repaired = shifted.chunk, shifted.repaired

    def counted(*arguments):
        seen["chunks"] += 1
        return chunk(*arguments)

    def watched(part, e, base, total):
        seen["rows"] += int((total > shifted.LIMIT).sum())
        return repaired(part, e, base, total)

    monkeypatch.setattr(shifted, "chunk", counted)
    monkeypatch.setattr(shifted, "repaired", watched)
    return seen


@pytest.mark.parametrize("scale", [1.0, 10.0, 60.0, 3000.0])
def test_losses_and_gradients_of_small_and_huge_logits(scale, forms):
    """Two columns decide the shift, so that large logits are above it."""
    x, weight, _, target = leaves(scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shifted, "SAMPLED", 1)
        found, stock = both(x, weight, target)
    for a, b in zip(found, stock, strict=True):
        close(a, b)
    assert forms["chunks"] == 3
    assert (forms["rows"] > 0) == (scale > 5)


def test_without_the_repair_a_huge_logit_is_lost(monkeypatch):
    x, weight, _, target = leaves(3000.0)
    monkeypatch.setattr(shifted, "SAMPLED", 1)
    monkeypatch.setattr(shifted, "_repaired", lambda part, e, base, total: (base, total))
    found, stock = both(x, weight, target)
    assert not torch.allclose(found[1], stock[1])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("column", [0, 5, V - 1])
def test_values_that_are_not_finite_spread_as_in_pytorch(value, column):
    x, weight, bias, target = leaves()
    with torch.no_grad():
        bias[column] = value
    options = {"bias": bias, "return_lse": True}
    found = codetta.linear_cross_entropy(x, weight, target, schedule="forward", **options)
    logits = x @ weight.t() + bias
    close(found.lse, torch.logsumexp(logits, 1))
    stock = torch.nn.functional.cross_entropy(logits, target)
    assert found.loss.isfinite() == stock.isfinite()
    if stock.isfinite():
        close(found.loss, stock)


def test_the_definition_of_the_repair():
    x, weight, bias, target = (t.detach() for t in leaves(100.0))
    rows = torch.rand(M, dtype=F64) + 0.5
    options = Options(Logits(bias=True, scale=0.7, rows=True))
    part = Head(Leaves(x, weight, bias, None, rows), target, options, WHOLE)
    z = 0.7 * (rows[:, None] * (x @ weight.t()) + bias)
    base = z[:, 0].clone()
    e = torch.exp(z - base[:, None])
    total = e.sum(1)
    bad = total > shifted.LIMIT
    assert bad.any() and not bad.all()
    new_base, new_total = shifted.repaired(part, e, base, total)
    close(new_base[bad], z.amax(1)[bad])
    close(new_base[~bad], base[~bad])
    close(new_base + new_total.log(), torch.logsumexp(z, 1))
    close(e, torch.exp(z - new_base[:, None]))


def test_what_the_form_does_not_know_takes_the_other(forms):
    x, weight, bias, target = leaves()
    for options in ({"softcap": 5.0}, {"label_smoothing": 0.1}, {"z_loss": 0.1}, {"bias": bias}):
        loss = codetta.linear_cross_entropy(x, weight, target, schedule="forward", **options)
        loss.backward()
    assert forms["chunks"] == 0
