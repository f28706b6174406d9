"""Streams, CUDA graphs and synchronisation of the fused backend, on a GPU."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import codetta
from codetta import programs
from codetta.errors import ColdCapture
from codetta.language import Col, Index, Row, Scalar, Tile, epilogue, round_to, rowsum, rsqrt
from codetta.language.functions import select

pytestmark = pytest.mark.cuda


@epilogue
def four_operands(acc, residual: Tile, gain: Row, scale: Col, alpha: Scalar, target: Index):
    x = round_to(acc * scale + residual)
    total = rowsum(x * x)
    return {
        "x": x,
        "y": round_to(x * gain * alpha),
        "rstd": rsqrt(total + 1.0),
        "chosen": select(x, target),
    }


def arguments(m=192, n=256, k=128):
    like = {"dtype": torch.bfloat16}
    named = {
        "residual": torch.randn(m, n, **like),
        "gain": torch.randn(n),
        "scale": torch.rand(m) + 0.5,
        "alpha": torch.ones(()),
        "target": torch.arange(m) % n,
    }
    return torch.randn(m, k, **like), torch.randn(n, k, **like).t(), named


@contextmanager
def no_synchronisation():
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def equal(x, y) -> bool:
    return all(torch.equal(p, q) for p, q in zip(x, y, strict=True))


def step(a, b, named):
    out = codetta.gemm(a, b, four_operands, **named)
    gradients = torch.autograd.grad(
        (out.x, out.y, out.rstd, out.chosen),
        (a, b, named["residual"], named["gain"], named["scale"]),
        (out.x.detach(), out.y.detach(), out.rstd.detach(), out.chosen.detach()),
    )
    return [*(x.detach() for x in out), *gradients]


def learning(a, b, named):
    for x in (a, b, named["residual"], named["gain"], named["scale"]):
        x.requires_grad_()
    return a, b, named


def test_nothing_waits_for_the_device(gpu):
    given = learning(*arguments())
    first = step(*given)
    with no_synchronisation():
        second = step(*given)
        codetta.gemm(given[0].detach(), given[1].detach(), programs.swiglu)
    assert equal(first, second)


def test_a_step_is_captured_and_replayed(gpu):
    a, b, named = arguments()
    static = learning(a, b, named)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*static)
    with torch.no_grad():
        a.copy_(torch.randn_like(a))
        named["residual"].copy_(torch.randn_like(named["residual"]))
    graph.replay()
    torch.cuda.synchronize()
    assert equal(captured, step(*static))


def test_a_kernel_met_first_in_a_capture_is_an_error_and_not_a_hang(gpu):
    @epilogue
    def never_seen(acc, t: Tile):
        return {"x": acc * 0.7251 + t, "s": rowsum(acc - t)}

    a, b, named = arguments()
    codetta.gemm(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ColdCapture, match="never_seen"), torch.cuda.graph(graph):
        codetta.gemm(a, b, never_seen, t=named["residual"])
    torch.cuda.synchronize()
    out = codetta.gemm(a, b, never_seen, t=named["residual"])  # and afterwards it runs
    assert out.x.isfinite().all()


def test_a_captured_rotation_follows_positions_that_change_between_replays(gpu):
    program = programs.row_scale_rotary(head_dim=64)
    m = 192
    a, w = torch.randn(m, 128).bfloat16(), torch.randn(256, 128).bfloat16()
    table, positions = codetta.rotary_table(1024, 64), torch.arange(m)
    table = table.to(a.device)
    named = {"r": torch.rand(m), "rope": (table, positions)}

    def call():
        out = codetta.gemm(a, w.t(), program, **named)
        return out if isinstance(out, torch.Tensor) else out[0]

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(3):
        positions.add_(17)
        graph.replay()
        assert torch.equal(captured, call())


def test_any_stream_gives_the_same(gpu):
    a, b, named = arguments(2048, 1024, 512)
    expected = codetta.gemm(a, b, four_operands, **named)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    made = []
    for stream in streams:
        with torch.cuda.stream(stream):
            made.append(codetta.gemm(a, b, four_operands, **named))
    torch.cuda.synchronize()
    assert all(equal(x, expected) for x in made)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_tensors_counts_and_not_the_current_one(gpu):
    a, b, named = arguments()
    expected = codetta.gemm(a, b, four_operands, **named)
    moved = {name: x.to("cuda:1") for name, x in named.items()}
    with torch.cuda.device(0):
        for _ in range(2):
            made = codetta.gemm(a.to("cuda:1"), b.to("cuda:1"), four_operands, **moved)
    assert all(x.device.index == 1 for x in made)
    assert equal([x.to("cuda:0") for x in made], expected)


def test_rows_beyond_a_32_bit_offset(gpu):
    """M x N passes 2^31 elements; the last rows are compared."""
    m, n, k = 2**20 + 77, 2304, 16
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    residual = torch.randn(1, n).bfloat16().expand(m, n).contiguous()
    out = codetta.gemm(a, b, programs.residual_ssq, residual=residual)
    tail = codetta.gemm(a[-77:], b, programs.residual_ssq, residual=residual[-77:])
    for x, ref in zip(out, tail, strict=True):
        torch.testing.assert_close(x[-77:], ref)
