"""The rule that cuts generated kernels keeps to what was measured, at any width."""

from __future__ import annotations

import pytest

from codetta.backends.cuda.triton_stages import cut, stages
from codetta.language import Col, Row, Tile, colsum, finalizer, round_to, rowsum
from codetta.programs import rotary

WIDTHS = (1, 40, 128, 1024, 1536, 4096, 151936)


@finalizer
def scale(x: Tile, r: Col, w: Row):
    return {"y": x * r * w}


@finalizer
def shift_and_scale(x: Tile, w: Row, v: Row):
    return {"y": x * w + v}


@finalizer
def squares(x: Tile):
    return {"s": rowsum(x * x)}


@finalizer
def products(x: Tile, y: Tile):
    return {"s": rowsum(x * y)}


@finalizer
def column_sums(x: Tile, y: Tile):
    return {"z": round_to(x * y, "operand"), "s": colsum(x * y)}


def cut_of(program, n=4096, raw=True, dtype="bf16"):
    compute = "fp64" if dtype == "fp64" else "fp32"
    return cut(stages(program, dtype, compute, raw).first, n, (128, 128))


def test_one_pass_holds_two_accesses_of_16_bytes_a_thread():
    for program in (scale, shift_and_scale, squares, products):
        for n in WIDTHS[3:]:
            made = cut_of(program, n)
            assert made.rows * made.cols == 16 * 32 * made.warps


def test_two_warps_where_they_move_enough():
    assert cut_of(scale).warps == cut_of(products).warps == 2
    assert cut_of(squares).warps == 4  # 2 KB
    assert cut_of(squares, dtype="fp64").warps == 2  # twice the bytes of four
    # Two vectors of fp32 for two rows of bf16 would be as much as the tiles.
    assert (cut_of(shift_and_scale).warps, cut_of(shift_and_scale).rows) == (4, 4)


HEADS = {"head_dim": 128, "heads": 40}


@pytest.mark.parametrize("raw", [False, True])
def test_column_sums_have_twice_the_threads_of_a_vector_and_tall_blocks(raw):
    halves = rotary.qk_norm_rotary_backward(**HEADS, pairs="halves")
    adjacent = rotary.qk_norm_rotary_backward(**HEADS, pairs="adjacent")
    for program, vector in ((halves, 64), (adjacent, 128), (column_sums, 128)):
        made = cut_of(program, 5120, raw)
        assert (made.cols, made.rows, 32 * made.warps) == (128, 32, 2 * vector)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("raw", [False, True])
def test_every_width_has_a_cut_of_whole_chunks(n, raw):
    for program in (scale, shift_and_scale, squares, products, column_sums):
        for dtype in ("bf16", "fp32", "fp64"):
            made = cut_of(program, n, raw, dtype)
            assert made.warps in (2, 4, 8) and made.rows >= 1
            assert made.chunk_rows % made.rows == 0
            assert made.rows * made.cols <= 32 * 32 * made.warps
