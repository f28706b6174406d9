"""Sums of products in 24 and 20 bits, in a bf16 matrix and one of bytes."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.budget import norm
from torch import Tensor

from codetta.backends.short_sums import low_columns
from codetta.ops import run_gemm_short_sum_

#: (M, N, K) of aligned, ragged and odd products.
SIZES = [(128, 128, 64), (300, 264, 72), (37, 50, 23), (1, 8, 1)]
LAYOUTS = ["nn", "tn", "nt"]


def operands(size, chunks, layout="nn", scale=1.0, seed=0):
    m, n, k = size
    torch.manual_seed(seed)

    def normal(rows, cols, side):
        shape = (rows, cols) if side == "n" else (cols, rows)
        x = (torch.randn(shape) * math.sqrt(scale)).bfloat16()
        return x if side == "n" else x.t()

    return [(normal(m, k, layout[0]), normal(k, n, layout[1])) for _ in range(chunks)]


@pytest.fixture(params=[24, 20], ids="{} bits".format)
def bits(request) -> int:
    return request.param


def summed(parts, bits, last=True) -> tuple[Tensor, Tensor]:
    (m, _), n = parts[0][0].shape, parts[0][1].shape[1]
    high = torch.full((m, n), math.nan, dtype=torch.bfloat16)
    low = torch.full((m, n if bits == 24 else 16 * (-(-n // 32))), 255, dtype=torch.uint8)
    for i, (a, b) in enumerate(parts):
        end = last and i == len(parts) - 1
        run_gemm_short_sum_(high, low, a, b, bits, first=i == 0, last=end)
    return high, low


def number(high, low, bits):
    """What the two matrices hold, element by element."""
    rest = torch.empty(high.shape, dtype=torch.int32)
    for c in range(high.shape[1]):
        if bits == 24:
            rest[:, c] = low[:, c].int() << 8
        else:
            group, at = divmod(c, 32)
            byte = low[:, 16 * group + at % 16].int()
            rest[:, c] = (byte >> 4 if at >= 16 else byte & 15) << 12
    return (high.view(torch.int16).int() << 16 | rest).view(torch.float32)


def exact(parts):
    return sum(a.double() @ b.double() for a, b in parts)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("chunks", [2, 5])
def test_the_last_product_leaves_the_rounded_sum(backend, bits, size, layout, chunks):
    parts = operands(size, chunks, layout)
    high, _ = summed(parts, bits)
    error, expected = high.double() - exact(parts), exact(parts)
    # half a unit of bf16, and what is cut off of sums that may be larger than the last one
    assert (error.abs() <= expected.abs() * 2.0**-8 + 2e-4 * expected.abs().max()).all()
    assert norm(error) <= (3e-3 if high.numel() < 100 else 1.8e-3) * norm(expected)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_before_it_there_are_as_many_bits(backend, bits, size):
    parts = operands(size, 6)
    found = number(*summed(parts, bits, last=False), bits).double()
    assert norm(found - exact(parts)) < {24: 1e-4, 20: 4e-4}[bits] * norm(exact(parts))


@pytest.mark.parametrize("chunks", [2, 16])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_at_any_magnitude(backend, bits, chunks, scale):
    parts = operands((64, 64, 32), chunks, scale=scale)
    found = number(*summed(parts, bits, last=False), bits).double()
    assert norm(found - exact(parts)) < {24: 2e-4, 20: 6e-4}[bits] * norm(exact(parts))


def test_sums_of_whole_numbers_are_exact(backend, bits):
    """Ties of bf16 among them, such as 257: nothing is rounded before the end."""
    parts = [(a.sign(), b.sign()) for a, b in operands((64, 64, 64), 40)]
    high, low = summed(parts, bits, last=False)
    assert torch.equal(number(high, low, bits).double(), exact(parts))
    one = torch.ones(64, 64, dtype=torch.bfloat16)
    for _ in range(5):
        run_gemm_short_sum_(high, low, one, one, bits, first=False, last=False)
    assert torch.equal(number(high, low, bits).double(), exact(parts) + 5 * 64)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.0])
def test_infinities_nan_and_zero_stay(backend, bits, value):
    a, b = torch.zeros(2, 8, 8, dtype=torch.bfloat16)
    a[0, 0], b[0] = value, 1.0
    zero, one = torch.zeros(8, 8, dtype=torch.bfloat16), torch.ones(8, 8, dtype=torch.bfloat16)
    for last in (False, True):
        high, _ = summed([(a, b), (zero, one), (zero, one)], bits, last)
        expected = torch.zeros(8, 8).index_fill(0, torch.tensor([0]), value)
        torch.testing.assert_close(high.float(), expected, equal_nan=True, rtol=0, atol=0)


def test_a_first_product_reads_nothing_and_a_last_one_writes_no_bytes(backend, bits):
    parts = operands((128, 64, 32), 2)
    once, again = summed(parts, bits, last=False), summed(parts, bits, last=False)
    assert all(torch.equal(x, y) for x, y in zip(once, again, strict=True))
    high, low = once
    kept = low.clone()
    run_gemm_short_sum_(high, low, *parts[0], bits, first=False, last=True)
    assert torch.equal(low, kept)
    for a, b in operands((128, 64, 32), 2):  # what is multiplied is not touched
        assert torch.equal(a, parts[0][0]) or torch.equal(a, parts[1][0])
        assert torch.equal(b, parts[0][1]) or torch.equal(b, parts[1][1])


def test_in_memory_with_gaps(backend, bits):
    """Matrices whose rows have a pitch that the kernels cannot write with."""
    parts = operands((32, 40, 16), 3)
    wide, bytes_ = torch.zeros(32, 47, dtype=torch.bfloat16), torch.zeros(32, 45, dtype=torch.uint8)
    high, low = wide[:, 3:43], bytes_[:, 2 : {24: 42, 20: 34}[bits]]
    for i, (a, b) in enumerate(parts):
        run_gemm_short_sum_(high, low, a, b, bits, first=i == 0, last=False)
    expected = summed(parts, bits, last=False)
    assert torch.equal(number(high.contiguous(), low, bits), number(*expected, bits))
    assert wide[:, :3].count_nonzero() == 0 == bytes_[:, 42:].count_nonzero()


@pytest.mark.parametrize(
    ("tile", "replaced"),
    [((192, 192, False, 1, 1), True), ((128, 176, True, 1, 1), True), ((192, 128, False), False),
     ((192, 128, True), False), ((128, 128, True, 1, 1, 8, 16), True)],
    ids=str,
)  # fmt: skip
def test_a_tile_that_would_part_a_byte_is_replaced(tile, replaced):
    from helpers.emulation import emulated

    from codetta.backends.cuda import short_sum
    from codetta.backends.cuda.configs import Configuration

    high, (a, b) = torch.empty(300, 264, dtype=torch.bfloat16), operands((300, 264, 64), 1)[0]
    config = Configuration(*tile)
    with emulated():
        for bits, other in ((20, replaced), (24, False)):
            low = torch.empty(300, low_columns(264, bits), dtype=torch.uint8)
            made = short_sum.call(short_sum.FIRST, high, low, a, b, bits, config)
            assert (made.config != config) == other
            assert not other or (made.config.tile, made.config.epi_n) == ((128, 128), 0)


@pytest.mark.cuda
def test_all_tiles_agree_where_the_bits_lie(gpu, bits):
    """One product puts them there in one tile and the next finds them in another."""
    from codetta.backends.cuda import quack, short_sum
    from codetta.backends.cuda.configs import Configuration

    tiles = [(128, 128, True, 1, 2), (192, 128, True, 1, 2), (256, 128, False), (128, 256, False),
             (64, 128, True, 1, 1), (192, 128, False, 1, 1), (128, 160, True, 2, 1)]  # fmt: skip
    parts = [(a.to(gpu), b.to(gpu)) for a, b in operands((520, 456, 96), 6, "tn")]
    (m, _), n = parts[0][0].shape, parts[0][1].shape[1]
    pitched = torch.empty(m, 464, dtype=torch.uint8, device=gpu)
    low = pitched[:, : low_columns(n, bits)]
    for i, tile in enumerate(tiles):
        high = torch.empty(m, n, dtype=torch.bfloat16, device=gpu)
        for j, (a, b) in enumerate(parts):
            config = Configuration(*tiles[(i + j) % len(tiles)])
            kind = short_sum.FURTHER if j else short_sum.FIRST
            made = short_sum.call(kind, high, low, a, b, bits, config)
            quack.launch(made.plan, *made.arrays)
        found = number(high.cpu(), low.cpu(), bits).double()
        wanted = exact([(a.cpu(), b.cpu()) for a, b in parts])
        assert norm(found - wanted) < {24: 1e-4, 20: 4e-4}[bits] * norm(wanted), tile


def test_it_is_an_operator_that_says_what_it_writes(bits):
    from torch.testing._internal.optests import fake_check

    high, low = summed(operands((16, 16, 8), 1), bits, last=False)
    a, b = operands((16, 16, 8), 1)[0]
    before = high._version, low._version
    run_gemm_short_sum_(high, low, a, b, bits, first=False, last=False)
    assert (high._version, low._version) == (before[0] + 1, before[1] + 1)
    fake_check(torch.ops.codetta.gemm_short_sum_.default, (high, low, a, b, bits, False, False), {})
