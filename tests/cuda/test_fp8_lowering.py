"""What the fused backend hands to QuACK where a and b are fp8: emulated, without a GPU."""

from __future__ import annotations

import pytest
import torch
from helpers.emulation import emulated

import codetta
from codetta import programs
from codetta.backends.cuda import arrays, assembly, feeds
from codetta.backends.cuda.configs import choose, family, layout_of
from codetta.backends.cuda.launch import explain
from codetta.backends.cuda.lowering import lower
from codetta.backends.cuda.rules import NotLowerable
from codetta.language import epilogue, store, unpack

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = ("fp8_scaled", "fp8_scaled_bias", "fp8_quantized")


def matrices(m=40, n=64, k=48):
    return torch.randn(m, k).to(E4), torch.randn(n, k).to(E4).t()


def scales(m=40, n=64):
    return [torch.rand(m, 1) + 0.5, torch.rand(1, n) + 0.5]


@pytest.mark.parametrize("name", NAMES)
def test_every_program_is_one_kernel(name):
    program = programs.catalog()[name].program
    assert explain(program, "fp8") is None
    lowered = lower(program, "fp8")
    assert family(lowered).startswith("fp8 ")
    assert choose(lowered, 16384, 4096, 4096) is not None


def test_a_row_maximum_is_one_sink():
    (sink,) = lower(programs.fp8_quantized(), "fp8").sinks
    assert (sink.fold, sink.over) == ("maximum", "n")


def test_how_sums_accumulate_is_told_to_quack():
    a, _ = matrices()
    attributes = [assembly.fp8_options(a)]
    with codetta.fp8_accumulation("full"):
        attributes.append(assembly.fp8_options(a))
    attributes.append(assembly.fp8_options(a))
    slow = [dict(x["attributes"])["fp8_slow_accum"] for x in attributes]
    assert slow == [False, True, False]
    assert assembly.fp8_options(a.bfloat16()) == {}


def test_each_way_to_accumulate_is_a_kernel_of_its_own():
    a, b = matrices()
    with emulated() as backend:
        for _ in range(2):
            backend.gemm(programs.fp8_scaled, a, b, scales(), None, False)
        kept = len(backend._calls)
        with codetta.fp8_accumulation("full"):
            backend.gemm(programs.fp8_scaled, a, b, scales(), None, False)
        assert (kept, len(backend._calls)) == (1, 2)


def test_what_lies_along_k_is_not_copied():
    a, b = matrices()
    feed_a, feed_b = feeds.sides(a, b)
    assert feed_a(a) is a
    assert feed_b(b) is b
    assert layout_of(a, b) == "nt"


@pytest.mark.parametrize("k", [48, 47])
def test_what_does_not_is_copied_to_padded_rows(k):
    a, b = matrices()
    a, b = a.t().contiguous().t()[:, :k], b.contiguous()[:k]
    feed_a, feed_b = feeds.sides(a, b)
    for made, given in ((feed_a(a), a), (feed_b(b).t(), b.t())):
        assert arrays.is_matrix(made, either=False)
        assert made.stride() == (48, 1)
        assert torch.equal(made.float(), given.float())
    assert layout_of(a, b) == "nt"


def test_rows_of_sixteen_bit_matrices_may_still_lie_either_way():
    a, b = (x.bfloat16() for x in matrices())
    feed_a, _ = feeds.sides(a.t().contiguous().t(), b)
    turned = a.t().contiguous().t()
    assert feed_a(turned) is turned


def test_halves_of_pairs_are_not_stored_in_fp8_by_one_kernel():
    @epilogue
    def gated(acc):
        g, u = unpack(acc)
        return store(g * u, "e5m2")

    with pytest.raises(NotLowerable, match="half-width store in e5m2"):
        lower(gated, "fp8")
    a, b = matrices()
    with emulated() as backend:
        (out,) = backend.gemm(gated, a, b, [], None, False)
    acc = a.float() @ b.float()
    assert torch.equal(out.float(), (acc[:, 0::2] * acc[:, 1::2]).to(E5).float())
