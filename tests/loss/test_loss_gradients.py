"""What is differentiated, how often, and by what."""

from __future__ import annotations

import pytest
import torch
from helpers.spy import Spy
from loss_oracle import close, head, reference

import codetta

SCHEDULES = ("forward", "recompute")


@pytest.mark.parametrize("chunk", [1, 4, None])
def test_each_token_has_its_own_upstream_gradient(chunk):
    x, weight, target, bias = head(11)
    upstream = torch.randn(11, dtype=torch.float64)
    found, expected = (
        torch.autograd.grad(
            f(x, weight, target, bias=bias, reduction="none", **o), (x, weight, bias), upstream
        )
        for f, o in (
            (codetta.linear_cross_entropy, {"chunk": chunk}),
            (lambda *a, **k: reference(*a, **k)[0], {}),
        )
    )
    close(found, expected)


def test_the_upstream_gradient_may_be_expanded_or_strided():
    x, weight, target, _ = head(3, 4)
    for upstream in (
        torch.tensor(0.7, dtype=torch.float64).expand(3, 4),
        torch.randn(4, 3, dtype=torch.float64).t(),
        torch.randn(3, 8, dtype=torch.float64)[:, ::2],
    ):
        found, expected = (
            torch.autograd.grad(loss, (x, weight), upstream)
            for loss in (
                codetta.linear_cross_entropy(x, weight, target, reduction="none", chunk=5),
                reference(x, weight, target, reduction="none")[0],
            )
        )
        close(found, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "x weight", "weight bias", "x bias"])
def test_a_frozen_tensor_costs_no_gemm(schedule, frozen):
    leaves = dict(zip(("x", "weight", "target", "bias"), head(11), strict=True))
    target = leaves.pop("target")
    for name in frozen.split():
        leaves[name] = leaves[name].detach()
    wanted = [t for t in leaves.values() if t.requires_grad]
    with Spy() as spy:
        loss = codetta.linear_cross_entropy(target=target, schedule=schedule, **leaves)
        found = torch.autograd.grad(loss, wanted)
    expected = torch.autograd.grad(reference(target=target, **leaves)[0], wanted)
    close(found, expected)
    logits = 1 if schedule == "forward" else 2
    products = sum(leaves[n].requires_grad for n in ("x", "weight"))
    assert spy.names.count("gemm") == logits + products


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_gradients_nothing_is_formed(schedule):
    x, weight, target, _ = head(11)
    with torch.no_grad(), Spy() as spy:
        loss = codetta.linear_cross_entropy(x, weight, target, schedule=schedule, chunk=11)
    assert spy.names == ["gemm"] and not loss.requires_grad
    close(loss, reference(x, weight, target)[0].detach())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_backward_may_run_several_times(schedule):
    x, weight, target, bias = head(11)
    loss = codetta.linear_cross_entropy(x, weight, target, bias=bias, schedule=schedule, chunk=4)
    leaves = (x, weight, bias)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss * 3, leaves, retain_graph=True)
    expected = torch.autograd.grad(reference(x, weight, target, bias=bias)[0], leaves)
    close(first, expected)
    close(second, tuple(3 * g for g in expected))
    close(list(first), kept, 0.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_tied_weight_gets_both_gradients(schedule):
    _, weight, target, _ = head(11)
    ids = torch.randint(0, 13, (11,))

    def gradient(function, **options):
        x = torch.nn.functional.embedding(ids, weight)
        made = function(x, weight, target, **options)
        return torch.autograd.grad(made[0] if isinstance(made, tuple) else made, weight)

    close(gradient(codetta.linear_cross_entropy, schedule=schedule, chunk=4), gradient(reference))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_second_derivatives_are_refused(schedule):
    x, weight, target, _ = head(11)
    loss = codetta.linear_cross_entropy(x, weight, target, schedule=schedule)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(codetta.errors.DoubleBackward):
        gradient.sum().backward()


def test_transforms_are_refused():
    x, weight, target, _ = head(2, 5)
    with pytest.raises(codetta.errors.TransformRefused):
        torch.func.vmap(lambda h, t: codetta.linear_cross_entropy(h, weight, t))(x, target)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_inputs_may_have_any_strides_and_are_not_written(schedule):
    x, weight, target, _ = (t.detach() for t in head(11))
    given = [
        x.t().contiguous().t().requires_grad_(),
        torch.stack([weight, weight], 2)[:, :, 0].requires_grad_(),
        torch.stack([target, target], 1)[:, 0],
    ]
    before = [t.detach().clone() for t in given]
    loss = codetta.linear_cross_entropy(*given, schedule=schedule, chunk=4)
    found = torch.autograd.grad(loss, given[:2])
    expected = reference(*given)[0]
    close(loss, expected)
    close(found, torch.autograd.grad(expected, given[:2]))
    assert all(torch.equal(t, b) for t, b in zip(given, before, strict=True))
    one = x[:1].expand(11, 8).requires_grad_()
    found = torch.autograd.grad(codetta.linear_cross_entropy(one, weight, target), one)
    close(found, torch.autograd.grad(reference(one, weight, target)[0], one))


def test_the_same_call_gives_the_same_bits():
    x, weight, target, _ = head(40, dtype=torch.bfloat16)
    for schedule in SCHEDULES:
        runs = [
            torch.autograd.grad(
                codetta.linear_cross_entropy(x, weight, target, schedule=schedule, chunk=16),
                (x, weight),
            )
            for _ in range(2)
        ]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_autocast_casts_as_for_a_linear_layer():
    x, weight, target, bias = head(11, dtype=torch.float32)
    narrow = [t.detach().bfloat16().requires_grad_() for t in (x, weight, bias)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = codetta.linear_cross_entropy(x, weight, target, bias=bias)
    plain = codetta.linear_cross_entropy(narrow[0], narrow[1], target, bias=narrow[2])
    assert loss.dtype is torch.float32 and torch.equal(loss, plain)
    found = torch.autograd.grad(loss, (x, weight, bias))
    assert all(g.dtype is torch.float32 for g in found)
    expected = torch.autograd.grad(plain, narrow)
    assert all(torch.equal(a, b.float()) for a, b in zip(found, expected, strict=True))
