"""Only what is asked for runs: GEMMs, passes and saved tensors, as a dispatch trace shows them."""

from __future__ import annotations

import pytest
import torch
from helpers.cases import CASES, inputs
from helpers.spy import Spy

import codetta
from codetta.backends import reference

M, K = 5, 3


def setting(name, *needing):
    """The call's inputs with gradients for the named ones."""
    program = CASES[name]
    a, b, operands = inputs(program, (M,), 4, K)
    for key, x in {"a": a, "b": b, **operands}.items():
        if key in needing:
            x.requires_grad_()
    return program, a, b, operands


def backward_calls(name, *needing):
    program, a, b, operands = setting(name, *needing)
    out = codetta.gemm(a, b, program, **operands)
    total = sum(x.sum() for x in ([out] if isinstance(out, torch.Tensor) else out))
    with Spy() as spy:
        total.backward()
    return spy.calls


def test_a_forward_is_one_operator():
    program, a, b, operands = setting("gated_adjacent", "a", "b", "r")
    with Spy() as spy:
        codetta.gemm(a, b, program, **operands)
    assert spy.names == ["gemm"]


def test_a_full_backward_is_a_pass_a_dgrad_and_a_wgrad():
    calls = backward_calls("silu", "a", "b")
    assert [name for name, _ in calls] == ["pointwise", "gemm", "gemm"]
    assert [shapes for _, shapes in calls] == [((M, 4),), ((M, K),), ((K, 4),)]


def test_a_frozen_weight_costs_no_wgrad():
    assert [s for n, s in backward_calls("silu", "a") if n == "gemm"] == [((M, K),)]


def test_a_frozen_input_costs_no_dgrad():
    assert [s for n, s in backward_calls("silu", "b") if n == "gemm"] == [((K, 4),)]


def test_a_gradient_of_an_operand_alone_costs_no_gemm():
    calls = backward_calls("gated_adjacent", "r")
    assert [name for name, _ in calls] == ["pointwise"]


def test_an_operand_without_gradient_is_not_computed():
    (name, shapes), *_ = backward_calls("gated_adjacent", "a")
    assert (name, len(shapes)) == ("pointwise", 1)
    (name, shapes), *_ = backward_calls("gated_adjacent", "a", "r")
    assert (name, len(shapes)) == ("pointwise", 2)


def test_an_unchanged_cotangent_costs_no_pass():
    assert [n for n, _ in backward_calls("identity", "a", "b")] == ["gemm", "gemm"]
    assert [n for n, _ in backward_calls("residual", "a", "b", "residual")] == ["gemm", "gemm"]
    assert backward_calls("residual", "residual") == []


def test_nothing_is_derived_when_no_gradient_is_needed():
    program, a, b, operands = setting("silu")
    assert not codetta.gemm(a, b, program, **operands).requires_grad
    program, a, b, operands = setting("silu", "a")
    with torch.no_grad():
        assert codetta.gemm(a, b, program, **operands).grad_fn is None


def test_the_accumulator_is_saved_only_if_the_backward_reads_it():
    def outputs_of_forward(name, *needing):
        program, a, b, operands = setting(name, *needing)
        with Spy() as spy:
            codetta.gemm(a, b, program, **operands)
        return len(spy.calls[0][1])

    assert outputs_of_forward("silu") == 1
    assert outputs_of_forward("silu", "a") == 2
    assert outputs_of_forward("identity", "a", "b") == 1
    assert outputs_of_forward("exp", "a") == 1  # its derivative is the stored result


def test_saved_tensors_are_those_that_the_backward_reads():
    def saved(name, *needing):
        packed = []

        def pack(x):
            packed.append(tuple(x.shape))
            return x

        program, a, b, operands = setting(name, *needing)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            codetta.gemm(a, b, program, **operands)
        return sorted(packed)

    assert saved("identity", "a") == [(K, 4)]  # b, for dgrad
    assert saved("identity", "b") == [(M, K)]  # a, for wgrad
    assert saved("residual", "residual") == []


def test_the_derived_backward_runs_and_not_that_of_the_reference(monkeypatch):
    """If autograd recorded the reference's own operations, gradients would not need codetta."""
    grad_modes = []
    original = reference.matmul

    def matmul(a, b, compute):
        result = original(a, b, compute)
        grad_modes.append(result.requires_grad)
        return result

    monkeypatch.setattr("codetta.backends.calls.matmul", matmul)
    program, a, b, _ = setting("silu", "a", "b")
    out = codetta.gemm(a, b, program)
    assert out.grad_fn.name() == "GemmBackward"
    out.sum().backward()
    assert grad_modes == [False, False, False]


@pytest.mark.parametrize("use", ["x", "loss"])
def test_a_pass_is_derived_for_the_used_outputs_only(use):
    program, a, b, operands = setting("total", "a", "t")
    out = codetta.gemm(a, b, program, **operands)
    with Spy() as spy:
        getattr(out, use).sum().backward()
    expected = {"x": ["gemm"], "loss": ["pointwise", "gemm"]}
    assert spy.names == expected[use]
