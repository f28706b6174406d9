"""Generated Triton kernels of every library program and its backward equal the reference."""

from __future__ import annotations

import pytest
import torch
from triton_cases import library, random_programs
from triton_runner import check, fitting, inputs

from codetta.backends.cuda import triton_kernels, triton_stages
from codetta.backends.cuda.triton_stages import Shape
from codetta.programs import rotary

LIBRARY = library()


@pytest.mark.parametrize("name", LIBRARY)
def test_finals_equal_the_reference(name):
    program = LIBRARY[name]
    m, n = 7, fitting(program, 41)
    check(program, inputs(program, m, n, torch.float32), m, n, torch.float32)


@pytest.mark.parametrize("name", LIBRARY)
def test_partials_of_strided_bf16_equal_the_reference(name):
    program = LIBRARY[name]
    m, n = 5, fitting(program, 53)
    operands = inputs(program, m, n, torch.bfloat16, strided=True)
    check(program, operands, m, n, torch.bfloat16, (3, fitting(program, 8)), raw=True)


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_equal_the_reference(seed):
    for program in random_programs(100 + seed, 12):
        m, n = 6, fitting(program, 50)
        check(program, inputs(program, m, n, torch.float32), m, n, torch.float32)
        operands = inputs(program, m, n, torch.bfloat16, strided=True)
        check(program, operands, m, n, torch.bfloat16, (4, fitting(program, 16)), raw=True)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that every loop over rows and columns takes several steps."""
    small = {
        "plain": Shape(16, 4, 16, 128),
        "tile": Shape(16, 2, 16, 128),
        "over_cols": Shape(16, 2, 16, 128),
        "over_rows": Shape(8, 2, 16, 128),
        "combine": Shape(8, 4, 16, 128),
    }
    monkeypatch.setattr(triton_stages, "SHAPES", small)
    monkeypatch.setattr(triton_stages, "ROWS_OF_COLUMN_SUM", 6)
    monkeypatch.setattr(triton_kernels, "_RECIPES", {})


STATISTICS = [
    "case_row_statistics", "case_cross_entropy", "case_column_sums", "case_total", "case_rms",
    "case_swapped_halves", "qk_norm_rotary_backward", "rotary_backward", "swiglu_backward",
    "layernorm_apply_backward", "row_scale_lse_target_backward_1",
]  # fmt: skip


@pytest.mark.parametrize("name", STATISTICS)
def test_many_blocks_of_rows_and_columns(name, small_blocks):
    program = LIBRARY[name]
    m, n = 29, fitting(program, 70)
    check(program, inputs(program, m, n, torch.float32), m, n, torch.float32)


def test_more_partials_than_a_finalizer_loads_at_once(small_blocks):
    program = LIBRARY["case_column_sums"]
    m, n = 225, 12  # 38 chunks of rows
    check(program, inputs(program, m, n, torch.float32), m, n, torch.float32)


SHAPED = ["rms_link_dgrad", "layernorm_apply_backward", "rotary_backward", "case_expanded"]


@pytest.mark.parametrize("name", SHAPED)
@pytest.mark.parametrize("m", [1, 7, 129])
def test_odd_shapes(name, m):
    program = LIBRARY[name]
    for n in (fitting(program, 12), fitting(program, 96), fitting(program, 137)):
        check(program, inputs(program, m, n, torch.bfloat16), m, n, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["layernorm_apply_backward", "case_cross_entropy", "swiglu"])
def test_other_dtypes(name, dtype):
    program = LIBRARY[name]
    m, n = 5, 24
    check(program, inputs(program, m, n, dtype), m, n, dtype)


def test_results_repeat_to_the_bit():
    program = LIBRARY["layernorm_apply_backward"]
    operands = inputs(program, 70, 96, torch.bfloat16)
    arguments = (program, operands, 70, 96, torch.bfloat16, torch.float32)
    first, second = (triton_kernels.pointwise(*arguments) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    bound = triton_kernels.Bound(triton_kernels.recipe(program, 96, *arguments[4:], None, False))
    for _ in range(2):
        again = bound(operands, 70, 96)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("head", [8, 12, 96, 128])
def test_a_block_that_is_one_head_and_sums_of_columns_over_several_blocks(head, raw):
    program = rotary.qk_norm_rotary_backward(head, heads=2, pairs="halves")
    m, n, tile = 150, 3 * head, (128, head)
    operands = inputs(program, m, n, torch.float32)
    check(program, operands, m, n, torch.float32, tile, raw)
