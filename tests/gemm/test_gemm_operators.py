"""The library operators keep PyTorch's contract: fake kernels, no aliases, autograd, tracing."""

from __future__ import annotations

import pytest
import torch
from helpers.cases import CASES, inputs
from helpers.spy import Spy

import codetta
from codetta.arguments import call_spec, canonical_operands
from codetta.errors import DoubleBackward, OutNeedsNoGrad, RawNeedsNoGrad
from codetta.language.types import Kind
from codetta.ops import run_gemm, run_pointwise

OPS = torch.ops.codetta
# All of opcheck's tests; the slow one traces forward and backward with dynamic shapes.
QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


def arguments(name, lead=(5,), dtype=torch.float32, grad=False):
    program = CASES[name]
    a, b, operands = inputs(program, lead, 3, 4, dtype)
    flat = canonical_operands(call_spec(program), a, b, len(a), operands)
    if grad:
        for x in (a, b, *flat):
            if x.is_floating_point():
                x.requires_grad_()
    return program, a, b, flat


@pytest.mark.parametrize("raw", [False, True], ids=["finals", "raw"])
@pytest.mark.parametrize("name", CASES)
def test_gemm_satisfies_opcheck(name, raw):
    program, a, b, flat = arguments(name)
    for tile in ((), (2, 3 * program.granule)):
        torch.library.opcheck(
            OPS.gemm.default, (program.text, a, b, flat, tile, raw), test_utils=QUICK
        )


@pytest.mark.parametrize("name", ["silu", "rms", "gated_halves"])
def test_gemm_traces_with_gradients_and_dynamic_shapes(name):
    program, a, b, flat = arguments(name, grad=True)
    torch.library.opcheck(OPS.gemm.default, (program.text, a, b, flat, (), False))


@pytest.mark.parametrize("name", CASES)
def test_pointwise_satisfies_opcheck(name):
    """On the passes of every derived backward."""
    program, a, b, operands = arguments(name)
    m, n = len(a), b.shape[1]
    for p in codetta.vjp(program).passes:
        flat = []
        for o in p.operands:
            rows = m if o.type.has_rows else 1
            cols = int(n * o.width) if o.type.has_cols else 1
            x = torch.ones(rows, cols)
            flat.append(x.long() if o.kind is Kind.INDEX else x)
            if o.kind is Kind.ROTARY:
                i = [x.name for x in program.operands].index(o.name)
                flat[-1:] = operands[i : i + 2]
        call = (p.text, flat, m, n, torch.bfloat16, torch.float32, (), False)
        torch.library.opcheck(OPS.pointwise.default, call, test_utils=QUICK)


def test_gemm_accumulate_satisfies_opcheck():
    _, a, b, _ = arguments("identity")
    target = torch.ones(len(a), b.shape[1])
    torch.library.opcheck(OPS.gemm_accumulate_.default, (target, a, b))


def test_results_share_no_memory():
    program, a, b, flat = arguments("two_names_of_one_value")
    out = run_gemm(program, a, b, flat)
    pointers = [x.untyped_storage().data_ptr() for x in (*out, *flat, a, b)]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("lead", [(0,), (1,)])
def test_fake_kernels_agree_at_few_rows(lead):
    for name in CASES:
        program, a, b, flat = arguments(name, lead)
        if lead == (0,) and name == "column_sums":
            continue
        for raw in (False, True):
            torch.library.opcheck(
                OPS.gemm.default, (program.text, a, b, flat, (), raw), test_utils=QUICK[2:]
            )


def test_meta_tensors_give_shapes():
    program = CASES["gated_adjacent"]
    a, b, r = (torch.empty(s, device="meta") for s in ((2, 3, 4), (4, 6), (2, 3)))
    out = codetta.gemm(a, b, program, r=r)
    assert (out.z.shape, out.y.shape, out.y.device.type) == ((2, 3, 6), (2, 3, 3), "meta")


def test_the_operator_differentiates_like_the_call():
    program, a, b, flat = arguments("silu", grad=True)
    direct = OPS.gemm(program.text, a, b, flat, (), False)[0]
    ours = torch.autograd.grad(direct.sum(), (a, b))
    theirs = torch.autograd.grad(codetta.gemm(a, b, program).sum(), (a, b))
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_operators_refuse_gradients_that_they_do_not_have():
    program, a, b, flat = arguments("silu", grad=True)
    with pytest.raises(RawNeedsNoGrad):
        OPS.gemm(program.text, a, b, flat, (), True)
    with pytest.raises(OutNeedsNoGrad):
        OPS.gemm_accumulate_(torch.ones(5, 3), a, b)
    (p,) = codetta.vjp(program, ["acc"]).passes
    x = torch.ones(5, 3, requires_grad=True)
    with pytest.raises(DoubleBackward):
        OPS.pointwise(p.text, [x] * len(p.operands), 5, 3, *[torch.float32] * 2, (), False)


def test_the_run_functions_record_no_gradient_and_show_in_a_trace():
    program, a, b, flat = arguments("silu", grad=True)
    with Spy() as spy:
        (y,) = run_gemm(program, a, b, flat)
        (p,) = codetta.vjp(program, ["acc"]).passes
        operands = [y] * len(p.operands)
        (z,) = run_pointwise(p, operands, 5, 3, torch.float32, torch.float32)
    assert spy.names == ["gemm", "pointwise"]
    assert not (y.requires_grad or z.requires_grad)


def test_make_fx_and_export_see_the_operator():
    from torch.fx.experimental.proxy_tensor import make_fx

    a, b, _ = inputs(CASES["silu"], (5,), 4, 3)
    traced = make_fx(lambda a, b: codetta.gemm(a, b, CASES["silu"]))(a, b)
    assert "codetta.gemm" in traced.code

    class Module(torch.nn.Module):
        def forward(self, a):
            return codetta.gemm(a, b, CASES["silu"])

    exported = torch.export.export(Module(), (a,))
    assert "torch.ops.codetta.gemm" in exported.module().code
    assert torch.equal(exported.module()(a), codetta.gemm(a, b, CASES["silu"]))


def test_autocast_does_not_reach_inside_an_operator():
    """A matmul inside a kernel, run under autocast, would be rounded to bf16 again."""
    a, b = torch.randn(9, 65), torch.randn(65, 7)
    target = torch.zeros(9, 7)
    with torch.autocast("cpu", torch.bfloat16):
        (out,) = run_gemm(codetta.ops.IDENTITY, a, b)
        codetta.ops.run_gemm_accumulate_(target, a, b)
    assert torch.equal(out, a @ b)
    torch.testing.assert_close(target, a @ b)
