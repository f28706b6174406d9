"""The fused backend writes D over C where it is offered to, and nowhere else: emulated."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from helpers.emulation import emulated
from test_lowering import call

from codetta import programs
from codetta.backends.layout import results
from codetta.language import Tile, epilogue, store
from codetta.language.types import Kind

BACKWARD = programs.catalog()["swiglu_backward"].program
DZ = next(i for i, r in enumerate(results(BACKWARD, True)) if r.width == 2 and not r.components)
Z = next(
    i for i, o in enumerate(BACKWARD.operands) if o.kind is Kind.TILE and o.width == Fraction(2)
)


def both(program, m, n, offer):
    """Raw results without an offer and with it, and the tensor that was offered."""
    a, b, operands = call(program, m, n, 24, torch.bfloat16)
    with emulated() as backend:
        expected = backend.gemm(program, a, b, operands, None, True)
        into, tensor = offer(operands)
        ours = backend.gemm(program, a, b, operands, None, True, into=into)
    return expected, ours, tensor


def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("m, n", [(128, 192), (130, 200), (1, 24)])
def test_dz_is_written_over_z(m, n):
    expected, ours, z = both(BACKWARD, m, n, lambda t: ({DZ: t[Z]}, t[Z]))
    assert ours[DZ].data_ptr() == z.data_ptr()
    assert all(x.data_ptr() != z.data_ptr() for i, x in enumerate(ours) if i != DZ)
    assert equal(expected, ours)


def test_a_warm_call_takes_what_is_offered_to_it_and_only_then():
    a, b, operands = call(BACKWARD, 128, 192, 24, torch.bfloat16)
    with emulated() as backend:
        expected = backend.gemm(BACKWARD, a, b, operands, None, True)
        for _ in range(3):
            given = list(operands)
            given[Z] = operands[Z].clone()
            assert equal(backend.gemm(BACKWARD, a, b, given, None, True), expected)
            assert torch.equal(given[Z], operands[Z])
            ours = backend.gemm(BACKWARD, a, b, given, None, True, into={DZ: given[Z]})
            assert ours[DZ].data_ptr() == given[Z].data_ptr() and equal(ours, expected)


def other_position(t):
    return {DZ + 1: t[Z]}, t[Z]


def not_an_operand(t):
    x = t[Z].clone()
    return {DZ: x}, x


@pytest.mark.parametrize("offer", [other_position, not_an_operand])
def test_other_offers_are_ignored(offer):
    expected, ours, x = both(BACKWARD, 128, 192, offer)
    assert equal(expected, ours)
    assert all(y.data_ptr() != x.data_ptr() for y in ours)


def test_memory_with_gaps_is_ignored():
    a, b, operands = call(BACKWARD, 64, 192, 24, torch.bfloat16)
    wide = torch.empty(64, 2 * operands[Z].shape[1], dtype=torch.bfloat16)
    operands[Z] = wide[:, : operands[Z].shape[1]].copy_(operands[Z])
    before = operands[Z].clone()
    with emulated() as backend:
        ours = backend.gemm(BACKWARD, a, b, operands, None, True, into={DZ: operands[Z]})
    assert torch.equal(operands[Z], before) and ours[DZ].is_contiguous()


def test_a_result_of_another_dtype_is_ignored():
    """An fp32 store does not fit over a bf16 operand."""

    @epilogue
    def widened(acc, x: Tile):
        return store(acc + x, "fp32")

    expected, ours, x = both(widened, 128, 64, lambda t: ({0: t[0]}, t[0]))
    assert ours[0].dtype is torch.float32 and equal(expected, ours)
    assert ours[0].data_ptr() != x.data_ptr()
