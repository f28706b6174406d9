"""Sizes, targets and values at the edge."""

from __future__ import annotations

import pytest
import torch
from loss_oracle import close, head, reference

import codetta

SCHEDULES = ("forward", "recompute")


def both(x, weight, target, leaves=None, **options):
    """(loss, gradients) here and in PyTorch."""
    leaves = leaves or (x, weight)
    for function in (codetta.linear_cross_entropy, reference):
        made = function(x, weight, target, **options)
        loss = made if isinstance(made, torch.Tensor) else made[0]
        yield loss.detach(), torch.autograd.grad(loss.sum(), leaves)
        options.pop("schedule", None), options.pop("chunk", None)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("v", "d"), [(1, 3), (2, 1), (7, 5), (129, 4), (32000, 4), (50257, 3)])
@pytest.mark.parametrize("m", [1, 5])
def test_vocabularies_of_any_size(schedule, v, d, m):
    x, weight, target, bias = head(m, v=v, d=d, ignored=0.0)
    target[-1] = v - 1
    got, expected = both(
        x, weight, target, (x, weight, bias), bias=bias, schedule=schedule, chunk=2,
        label_smoothing=0.1,
    )  # fmt: skip
    close(got, expected, 1e-11)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("lead", [(), (1,), (1, 1, 3)])
def test_leading_dimensions(reduction, lead):
    x, weight, target, _ = head(*lead, ignored=0.0)
    got, expected = both(x, weight, target, reduction=reduction)
    close(got, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_tokens_at_all(reduction):
    x, weight, target, bias = head(0)
    got, expected = both(x, weight, target, (x, weight, bias), bias=bias, reduction=reduction)
    close(got, expected)
    made = codetta.linear_cross_entropy(
        x, weight, target, return_lse=True, return_accuracy=True, return_logits=True
    )
    assert made.lse.shape == (0,) and made.logits.shape == (0, 13)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_sequences_of_no_tokens_shifted(reduction):
    x, weight, target, _ = head(2, 0)
    got, expected = both(x, weight, target, (x, weight), reduction=reduction, shift=True)
    close(got, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("weighted", [False, True])
def test_all_targets_ignored(schedule, weighted):
    """'mean' is NaN with zero gradients, as in PyTorch; with a number of items it is 0."""
    x, weight, target, _ = head(5, ignored=2.0)
    options = {"schedule": schedule, "chunk": 2}
    leaves = [x, weight]
    if weighted:
        options["token_weight"] = torch.rand(5, requires_grad=True)
        leaves.append(options["token_weight"])
    for extra, value in (
        ({}, float("nan")), ({"num_items_in_batch": 8}, 0.0), ({"reduction": "sum"}, 0.0),
    ):  # fmt: skip
        loss = codetta.linear_cross_entropy(x, weight, target, **options, **extra)
        close(loss.detach(), torch.tensor(value, dtype=torch.float64))
        assert all(not g.any() for g in torch.autograd.grad(loss, leaves))
    close(reference(x, weight, target)[0].detach(), torch.tensor(float("nan")).double())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_chunk_may_be_ignored_as_a_whole(schedule):
    x, weight, target, _ = head(12, ignored=0.0)
    target[4:8] = -100
    got, expected = both(x, weight, target, schedule=schedule, chunk=4)
    close(got, expected)
    assert not got[1][0][4:8].any()


@pytest.mark.parametrize("given", [-1, 13, -101, 2**40])
def test_a_target_outside_the_vocabulary_is_named(given):
    x, weight, target, _ = head(5)
    target[3] = given
    with pytest.raises(codetta.errors.TargetOutOfRange, match=f"is {given} at position 3"):
        codetta.linear_cross_entropy(x, weight, target)
    ignored = codetta.linear_cross_entropy(x, weight, target.clamp_min(0) % 13, ignore_index=given)
    assert ignored.isfinite()


def test_a_target_that_nobody_looks_at_selects_nothing(monkeypatch):
    """As on a GPU, where looking would wait for it: such a token has a logit of 0."""
    monkeypatch.setattr("codetta.loss.call.check_targets", lambda *_: None)
    x, weight, target, _ = head(5, ignored=0.0)
    target[3] = 13
    losses = codetta.linear_cross_entropy(x, weight, target, reduction="none")
    _, lse, _ = reference(x, weight, target.clamp_max(12), reduction="none")
    close(losses[3], lse[3])
    (gradient,) = torch.autograd.grad(losses[3], x)
    close(gradient, torch.autograd.grad(lse[3], x)[0])


def test_targets_may_be_int32():
    x, weight, target, _ = head(5)
    a, b = (codetta.linear_cross_entropy(x, weight, t) for t in (target, target.int()))
    assert torch.equal(a, b)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_stay_where_pytorch_has_them(schedule, value):
    x, weight, target, _ = head(6, ignored=0.0)
    with torch.no_grad():
        x[2, 1] = value
    got, expected = both(x, weight, target, schedule=schedule, chunk=2)
    close(got[0], expected[0])
    assert torch.equal(got[1][0].isnan(), expected[1][0].isnan())
    finite = torch.arange(6) != 2
    close(got[1][0][finite], expected[1][0][finite])
    losses = codetta.linear_cross_entropy(x, weight, target, reduction="none")
    assert losses[2].isnan() and losses[finite].isfinite().all()
    target[2] = -100
    assert codetta.linear_cross_entropy(x, weight, target).isfinite()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_large_logits_neither_overflow_nor_lose_the_loss(schedule):
    x, weight, target, _ = head(6, spread=300.0, ignored=0.0)
    got, expected = both(x, weight, target, schedule=schedule, chunk=2)
    close(got, expected, 1e-10)
    assert got[0] > 100
