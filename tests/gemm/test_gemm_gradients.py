"""Derived gradients equal those of PyTorch: every program, every dtype, any incoming gradient."""

from __future__ import annotations

import pytest
import torch
from helpers.budget import within_budget
from helpers.cases import CASES, differentiable, inputs
from helpers.mutation import fails_when_broken
from helpers.oracle import run
from hypothesis import given, settings
from hypothesis import strategies as st

import codetta
from codetta.language import Col, Row, epilogue, logsumexp, pack
from codetta.language.primitives import DERIVATIVE, PRIMITIVES

NAMES = list(CASES)


def leaves_of(program, a, b, operands):
    """The differentiable inputs by name, as leaves that require grad."""
    named = {"a": a, "b": b, **{name: operands[name] for name in differentiable(program)}}
    return {name: x.detach().clone().requires_grad_() for name, x in named.items()}


def call(program, leaves, operands, **options):
    given = {**operands, **{k: v for k, v in leaves.items() if k not in ("a", "b")}}
    out = codetta.gemm(leaves["a"], leaves["b"], program, **given, **options)
    return (out,) if isinstance(out, torch.Tensor) else tuple(out)


# --------------------------------------------------------------------------- what is covered
def primitives_in(program):
    derived = codetta.vjp(program).passes
    return {node.op for p in (program, *derived) for node in p.nodes}


def test_every_primitive_occurs_in_a_program_that_is_differentiated_here():
    # `combine` occurs in the finalizers of plans, never in a call.
    assert set(PRIMITIVES) - {"combine"} == set().union(*map(primitives_in, CASES.values()))


def test_every_primitive_has_a_derivative():
    assert list(DERIVATIVE.missing()) == []


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_finite_differences(wide_backend, name):
    program = CASES[name]
    a, b, operands = inputs(program, (3,), 1 if program.granule > 2 else 3, 2)
    leaves = leaves_of(program, a, b, operands)
    keys = list(leaves)

    def function(*values):
        return call(program, dict(zip(keys, values, strict=True)), operands, tile=(2, 4))

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


def test_gradient_of_a_vector_that_is_packed_or_is_a_payload_is_summed():
    @epilogue
    def beside(acc, w: Row, c: Col):
        _, over_w, over_c = logsumexp(acc, w, c * w)
        return {"x": pack(acc, w), "y": pack(c, acc), "s": over_w, "t": over_c}

    g = torch.Generator().manual_seed(0)
    sizes = ((3, 2), (2, 4), (4,), (3,))
    values = [torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True) for s in sizes]
    assert torch.autograd.gradcheck(
        lambda a, b, w, c: tuple(codetta.gemm(a, b, beside, tile=(2, 2), w=w, c=c)), values
    )


# ------------------------------------------------------------------------------- precision
def check_gradients(program, a, b, operands, seed=1):
    """All gradients within the budget; in the dtype and shape of the inputs."""
    generator = torch.Generator("cpu").manual_seed(seed)
    leaves = leaves_of(program, a, b, operands)
    outputs = call(program, leaves, operands)
    names = [o.name for o in program.outputs]
    cotangents = {
        name: torch.randn(y.shape, generator=generator, device="cpu").to(y)
        for name, y in zip(names, outputs, strict=True)
    }
    gradients = torch.autograd.grad(outputs, list(leaves.values()), list(cotangents.values()))
    exact = run(program, a, b, operands, torch.float64, cotangents).gradients
    eager = run(program, a, b, operands, a.dtype, cotangents).gradients
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        assert (gradient.dtype, gradient.shape) == (leaf.dtype, leaf.shape), name
        within_budget(f"d_{name}", gradient, exact[name], eager[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_within_the_error_budget(backend, name, dtype):
    program = CASES[name]
    # Ties, and choices that hang on rounding, have no gradient to compare with in 16 bits.
    if dtype is not torch.float32 and name in ("row_maximum", "column_sums", "relu", "extremes"):
        pytest.skip("the maximum of rounded values is not the rounded maximum")
    check_gradients(program, *inputs(program, (2, 4), 3, 5, dtype))


@pytest.mark.parametrize("name", ["gated_halves", "rms", "cross_entropy", "expanded"])
def test_the_check_of_gradients_fails_on_broken_kernels(name):
    program = CASES[name]
    arguments = inputs(program, (6,), 3, 4, torch.float32)
    check_gradients(program, *arguments)
    fails_when_broken(lambda: check_gradients(program, *arguments), ops=("pointwise",))
    fails_when_broken(lambda: check_gradients(program, *arguments), ops=("gemm",))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    name=st.sampled_from([n for n in NAMES if n != "column_sums"]),
    lead=st.sampled_from([(), (0,), (1,), (7,), (129,), (2, 3)]),
    units=st.sampled_from([1, 3, 13]),
    k=st.sampled_from([0, 1, 7]),
)
def test_gradients_at_any_shape(name, lead, units, k):
    check_gradients(CASES[name], *inputs(CASES[name], lead, units, k, torch.float32))


def test_gradients_come_in_the_dtype_of_each_input():
    a, b, operands = inputs(CASES["arithmetic"], (5,), 4, 3, torch.bfloat16)
    operands["t"], operands["w"] = operands["t"].float(), operands["w"].float()
    operands["r"] = operands["r"].half()
    check_gradients(CASES["arithmetic"], a, b, operands)


def test_a_column_given_as_a_matrix_gets_its_gradient_as_a_matrix():
    a, b, operands = inputs(CASES["bare_reduction"], (2, 3), 4, 3)
    r = operands["r"].unsqueeze(-1).requires_grad_()
    codetta.gemm(a, b, CASES["bare_reduction"], r=r).sum().backward()
    assert r.grad.shape == (2, 3, 1)
    torch.testing.assert_close(r.grad, (a @ b).sum(-1, keepdim=True))


# ---------------------------------------------------------------------- incoming gradients
@pytest.mark.parametrize("name", ["rms", "gated_adjacent", "residual", "cross_entropy", "total"])
def test_expanded_incoming_gradients(name):
    """out.sum() hands back a gradient of stride 0."""
    program = CASES[name]
    a, b, operands = inputs(program, (5,), 4, 3)
    leaves = leaves_of(program, a, b, operands)
    outputs = call(program, leaves, operands)
    ones = {o.name: torch.ones_like(y) for o, y in zip(program.outputs, outputs, strict=True)}
    sum(y.sum() for y in outputs).backward()
    exact = run(program, a, b, operands, torch.float64, ones).gradients
    for key, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, exact[key])


def test_non_contiguous_incoming_gradients():
    a, b, _ = inputs(CASES["silu"], (5,), 6, 3)
    leaves = leaves_of(CASES["silu"], a, b, {})
    (out,) = call(CASES["silu"], leaves, {})
    cotangent = torch.randn(6, 5, dtype=torch.float64).t()
    gradients = torch.autograd.grad(out, list(leaves.values()), cotangent)
    exact = run(CASES["silu"], a, b, {}, torch.float64, {"result": cotangent}).gradients
    for key, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(gradient, exact[key])


@pytest.mark.parametrize("name", NAMES)
def test_incoming_gradients_are_left_as_they_were(name):
    program = CASES[name]
    a, b, operands = inputs(program, (4,), 2, 3, torch.float32)
    leaves = leaves_of(program, a, b, operands)
    outputs = call(program, leaves, operands)
    cotangents = [torch.randn_like(y) for y in outputs]
    before = [d.clone() for d in cotangents]
    torch.autograd.backward(outputs, cotangents)
    for leaf in leaves.values():
        leaf.grad.add_(1.0)  # a gradient must not be the caller's tensor either
    assert all(torch.equal(x, y) for x, y in zip(cotangents, before, strict=True))


@pytest.mark.parametrize("name", ["rms", "cross_entropy", "column_sums", "arithmetic"])
def test_unused_outputs_do_not_count(name):
    """The gradient of one output alone is that with zero cotangents for the others."""
    program = CASES[name]
    a, b, operands = inputs(program, (4,), 3, 3)
    for i, out in enumerate(program.outputs):
        leaves = leaves_of(program, a, b, operands)
        y = call(program, leaves, operands)[i]
        d = torch.randn_like(y)
        gradients = torch.autograd.grad(y, list(leaves.values()), d)
        exact = run(program, a, b, operands, torch.float64, {out.name: d}).gradients
        for key, gradient in zip(leaves, gradients, strict=True):
            torch.testing.assert_close(gradient, exact[key], msg=f"{out.name} by {key}")


@pytest.mark.parametrize("name", ["silu", "rms", "row_maximum"])
def test_every_backward_of_a_graph_gives_the_same(name):
    program = CASES[name]
    a, b, operands = inputs(program, (4,), 3, 3, torch.float32)
    leaves = list((named := leaves_of(program, a, b, operands)).values())
    outputs = call(program, named, operands)
    cotangents = [torch.randn_like(y) for y in outputs]
    first, second, third = (
        torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True) for _ in range(3)
    )
    for x, y, z in zip(first, second, third, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(y, z)


def test_a_zero_gradient_is_zeros():
    a, b, _ = inputs(CASES["identity"], (3,), 4, 2)
    zero = codetta.epilogue(_to_the_zeroth)
    a.requires_grad_()
    codetta.gemm(a, b, zero).sum().backward()
    assert torch.equal(a.grad, torch.zeros_like(a))


def _to_the_zeroth(acc):
    return acc**0


def test_saved_tensors_changed_in_place_are_noticed():
    a, b, _ = inputs(CASES["silu"], (3,), 4, 2)
    a.requires_grad_()
    out = codetta.gemm(a, b.requires_grad_(), CASES["silu"])
    with torch.no_grad():
        a += 1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_anomaly_mode_and_hooks_see_the_gradients():
    a, b, _ = inputs(CASES["silu"], (3,), 4, 2)
    seen = []
    out = codetta.gemm(a.requires_grad_(), b, CASES["silu"])
    out.register_hook(lambda d: seen.append(d.clone()))
    with torch.autograd.detect_anomaly(check_nan=True):
        out.sum().backward()
    assert torch.equal(seen[0], torch.ones_like(out))


def test_a_result_may_be_changed_in_place_as_any_other_tensor() -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5)
    y = codetta.gemm(a, b)
    y.mul_(2.0)
    y.sum().backward()
    torch.testing.assert_close(a.grad, 2.0 * torch.ones(3, 5) @ b.t())
