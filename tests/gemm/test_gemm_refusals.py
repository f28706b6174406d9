"""What autograd and torch.func cannot do with a call is refused by name, never half done."""

from __future__ import annotations

import pytest
import torch
from helpers.cases import CASES, inputs

import codetta
from codetta.errors import DoubleBackward, NotDifferentiable, RawNeedsNoGrad, TransformRefused


@pytest.fixture
def matrices():
    a, b, _ = inputs(CASES["silu"], (4,), 3, 2)
    return a.requires_grad_(), b.requires_grad_()


@pytest.mark.parametrize("name", ["identity", "silu"])
def test_a_second_derivative_is_refused(matrices, name):
    a, b = matrices
    out = codetta.gemm(a, b, CASES[name])
    (first,) = torch.autograd.grad(out.pow(2).sum(), a, create_graph=True)
    with pytest.raises(DoubleBackward, match=name):
        first.sum().backward()


def test_a_second_derivative_is_refused_when_the_incoming_gradient_is_constant(matrices):
    # The gradient of a.b summed depends on b only through codetta: it must not look constant.
    a, b = matrices
    (first,) = torch.autograd.grad(codetta.gemm(a, b).sum(), a, create_graph=True)
    with pytest.raises(DoubleBackward):
        (first * a).sum().backward()


def test_create_graph_alone_changes_nothing(matrices):
    a, b = matrices
    out = codetta.gemm(a, b, CASES["silu"])
    first = torch.autograd.grad(out.sum(), (a, b), create_graph=True)
    again = torch.autograd.grad(codetta.gemm(a, b, CASES["silu"]).sum(), (a, b))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def product(x, b):
    return codetta.gemm(x, b)


@pytest.mark.parametrize(
    ("name", "transform"),
    [
        ("vmap", lambda a, b: torch.func.vmap(lambda x: product(x, b))(torch.stack([a, a]))),
        ("grad", lambda a, b: torch.func.grad(lambda x: product(x, b).sum())(a)),
        ("vjp|grad", lambda a, b: torch.func.vjp(lambda x: product(x, b), a)),
        ("jvp", lambda a, b: torch.func.jvp(lambda x: product(x, b), (a,), (a,))),
        ("vmap|jvp", lambda a, b: torch.func.jacfwd(lambda x: product(x, b))(a)),
        ("vmap|grad", lambda a, b: torch.func.jacrev(lambda x: product(x, b))(a)),
    ],
    ids=["vmap", "grad", "vjp", "jvp", "jacfwd", "jacrev"],
)
def test_transforms_are_refused_by_name(matrices, name, transform):
    with pytest.raises(TransformRefused, match=name):
        transform(*(x.detach() for x in matrices))


def test_forward_mode_duals_are_refused(matrices):
    a, b = (x.detach() for x in matrices)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
        with pytest.raises(TransformRefused, match="jvp"):
            codetta.gemm(dual, b)
        codetta.gemm(a, b)  # what carries no tangent is fine


def test_functional_call_is_no_transform(matrices):
    class Linear(torch.nn.Linear):
        def forward(self, x):
            return codetta.gemm(x, self.weight.t())

    a, b = matrices
    out = torch.func.functional_call(Linear(2, 3, bias=False), {"weight": b.t()}, (a,))
    torch.testing.assert_close(out, a @ b)


def test_partials_have_no_gradient(matrices):
    a, b = matrices
    with pytest.raises(RawNeedsNoGrad, match="but a requires grad"):
        codetta.gemm(a, b, CASES["rms"], raw=True, residual=torch.zeros(4, 3).double())
    with torch.no_grad():
        codetta.gemm(a, b, CASES["rms"], raw=True, residual=torch.zeros(4, 3).double())


def test_a_table_of_angles_has_no_gradient(matrices):
    a, _ = matrices
    b, table = torch.ones(2, 4).double(), codetta.rotary_table(5, 4).requires_grad_()
    with pytest.raises(NotDifferentiable, match="rope"):
        codetta.gemm(a, b, CASES["rotated"], rope=(table, torch.arange(4)), r=torch.ones(4))
