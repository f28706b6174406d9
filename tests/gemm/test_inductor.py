"""Inductor knows the library operators before it meets them; see codetta.ops.inductor."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import codetta
from codetta.language import epilogue
from codetta.ops.inductor import tell_inductor

lowering = pytest.importorskip("torch._inductor.lowering")


@epilogue
def doubled(acc):
    return acc * 2.0


def loss(x, w, target):
    return codetta.linear_cross_entropy(x, w, target)


def traced(function, *shapes, target=False):
    """Run it on tensors without memory."""
    with FakeTensorMode():
        given = [torch.empty(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
        given += [torch.empty(8, dtype=torch.int64)] if target else []
        function(*given)


CASES = {
    "gemm": lambda: traced(lambda a, b: codetta.gemm(a, b, doubled), (8, 16), (16, 32)),
    "linear_cross_entropy_forward": lambda: traced(loss, (8, 16), (32, 16), target=True),
}


@pytest.fixture
def forgotten():
    """Inductor's table of lowerings, put back in the end."""
    before = dict(lowering.lowerings)
    yield lowering.lowerings
    lowering.lowerings.clear()
    lowering.lowerings.update(before)


@pytest.mark.parametrize("name", CASES)
def test_an_operator_that_is_traced_has_a_lowering(forgotten, name):
    operator = getattr(torch.ops.codetta, name).default
    forgotten.pop(operator, None)
    CASES[name]()
    assert operator in forgotten


def test_the_lowering_keeps_the_strides_that_the_operator_was_traced_with(forgotten):
    """As Inductor's own does: the operators' results depend on them."""
    from torch._library.utils import get_layout_constraint_tag

    operator = torch.ops.codetta.gemm.default
    forgotten.pop(operator, None)
    tell_inductor(operator)
    expected = lowering.tag_to_layout_constraint(
        get_layout_constraint_tag(operator, with_default=True)
    )
    assert lowering._maybe_layout_constraints[operator] is expected


def test_another_inductor_is_left_alone(forgotten, monkeypatch):
    """Where its names are gone it makes the lowering itself."""
    operator = torch.ops.codetta.gemm.default
    monkeypatch.delattr(lowering, "tag_to_layout_constraint")
    forgotten.pop(operator, None)
    tell_inductor(operator)
    assert operator not in forgotten
