"""The cost model of programs: bytes, operations, registers."""

from __future__ import annotations

from fractions import Fraction

import pytest

from codetta import programs
from codetta.language import Row, epilogue, exp, rowsum, unpack
from codetta.language.traffic import peak_registers, traffic

M, N, K = 256, 512, 64


def test_bytes_of_a_residual_with_its_row_sum():
    cost = traffic(programs.residual_ssq, M, N, K)
    assert cost.read == {"a": M * K * 2, "b": K * N * 2, "residual": M * N * 2}
    assert cost.written == {"x": M * N * 2, "ssq": M * (N // 128) * 4}
    assert cost.bytes_written == M * N * 2 + M * 4 * 4


def test_mainloop_and_epilogue_operations_are_separate():
    cost = traffic(programs.row_scale, M, N, K)
    assert (cost.mainloop_flops, cost.flops, cost.special) == (2 * M * N * K, M * N, 0)


def test_special_functions_count_once_per_element_of_their_width():
    cost = traffic(programs.swiglu, M, N, K)
    assert cost.special == M * (N // 2) * 2  # a sigmoid is an exp and a reciprocal
    assert cost.written == {"result": M * (N // 2) * 2}


def test_a_column_reduction_has_a_partial_per_tile_of_rows():
    cost = traffic(programs.rms_link_wgrad, M, N, K, tile=(64, 128))
    assert cost.written["dgamma"] == N * (M // 64) * 4


def test_chan_partials_have_three_components_each():
    cost = traffic(programs.layernorm_statistics(1e-5), M, N, K)
    assert cost.written["mean"] == cost.written["r"] == M * (N // 128) * 3 * 4


def test_without_an_accumulator_there_is_no_mainloop():
    cost = traffic(programs.rms_link_coefficient, M, 1)
    assert cost.mainloop_flops == 0
    assert cost.read == {"r": M * 4, "zdz": M * 4, "dim": 4}
    assert cost.written == {"c": M * 4}


def test_rotary_reads_its_table_once_per_row():
    cost = traffic(programs.row_scale_rotary(64), M, N, K)
    assert cost.read["rope"] == M * (64 * 4 + 8)


def test_stores_count_in_their_own_dtype():
    assert traffic(programs.identity, M, N, K, operand_bytes=4).written == {"result": M * N * 4}


@epilogue
def two_alive(acc, w: Row):
    kept = acc * w
    return {"x": kept + exp(kept), "s": rowsum(kept)}


@pytest.mark.parametrize(
    ("program", "registers"),
    [
        (programs.identity, 1),
        (programs.row_scale, 1),  # in place
        (programs.residual, 2),  # the loaded tile
        (two_alive, 2),
        (programs.rms_link_dgrad, 2),  # one operand tile at a time
        (epilogue(lambda acc: unpack(acc)[0]), 1),  # a view
    ],
)
def test_registers_are_the_values_alive_at_once(program, registers):
    assert peak_registers(program) == Fraction(registers)


def test_the_gated_backward_needs_more_registers_than_any_forward_program():
    forward = [programs.row_scale_swiglu, programs.residual_ssq, programs.row_scale_rotary(4)]
    need = peak_registers(programs.swiglu_backward)
    assert need > max(map(peak_registers, forward))
