"""The rotary table that the mainloop reads is kept exactly as long as it is right."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers.emulation import emulated

import codetta
from codetta import programs
from codetta.backends.calls import REFERENCE
from codetta.backends.cuda import rotary as module
from codetta.backends.cuda.rotary import gathered, rotary


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    monkeypatch.setattr(module, "_TURNS", type(module._TURNS)())


@pytest.fixture
def table():
    return codetta.rotary_table(64, 8)


def by_hand(table, positions, head_dim, columns):
    half = table.shape[1] // 2
    out = torch.zeros(len(positions), columns, dtype=table.dtype)
    for row, p in enumerate(positions.tolist()):
        for column in range(columns):
            within = column % head_dim
            if within < 2 * half:
                out[row, column] = table[p, within // 2 + (within % 2) * half]
    return out


@pytest.mark.parametrize("head_dim, columns", [(8, 8), (8, 32), (16, 32), (12, 36)])
def test_cos_and_sin_by_turns(table, head_dim, columns):
    positions = torch.tensor([3, 0, 63, 3, 7])
    expected = by_hand(table, positions, head_dim, columns)
    for made in (rotary, gathered):
        found = made(table, positions, head_dim, columns)
        assert found.is_contiguous() and torch.equal(found, expected)


def test_the_same_table_and_positions_are_gathered_once(table):
    positions = torch.arange(16)
    first = rotary(table, positions, 8, 32)
    assert rotary(table, positions, 8, 32) is first
    # Views of the same memory made on the way, as a call makes them.
    assert rotary(table.view(64, 8), positions.reshape(-1, 1).reshape(16), 8, 32) is first
    assert rotary(table, positions, 8, 64) is not first
    assert rotary(table, positions[:8], 8, 32).shape == (8, 32)


@pytest.mark.parametrize("changed", ["table", "positions", "view of the positions"])
def test_a_change_in_place_is_seen(table, changed):
    positions = torch.arange(16)
    before = rotary(table, positions, 8, 32).clone()
    if changed == "table":
        table.mul_(2)
    elif changed == "positions":
        positions.add_(3)
    else:
        positions[4:].add_(5)
    after = rotary(table, positions, 8, 32)
    assert not torch.equal(before, after)
    assert torch.equal(after, by_hand(table, positions, 8, 32))


def test_memory_that_is_freed_and_reused_is_not_taken_for_the_old_one(table):
    memory = bytearray(16 * 8)  # an allocator may give the same memory again: here it always does
    for step in range(20):
        torch.frombuffer(memory, dtype=torch.int64).copy_(torch.arange(16) + step % 7)
        positions = torch.frombuffer(memory, dtype=torch.int64)
        made = rotary(table, positions, 8, 32)
        assert torch.equal(made, by_hand(table, positions, 8, 32))
        del positions


def test_entries_are_few_and_do_not_outlive_their_inputs(table):
    kept = [torch.arange(16) + i for i in range(20)]
    for positions in kept:
        rotary(table, positions, 8, 32)
    assert len(module._TURNS) <= 8
    del kept, positions
    gc.collect()
    last = torch.arange(16)
    rotary(table, last, 8, 32)
    assert len(module._TURNS) == 1


def test_a_capture_neither_uses_nor_makes_entries(table, monkeypatch):
    positions = torch.arange(16)
    kept = rotary(table, positions, 8, 32)
    monkeypatch.setattr(module, "capturing", lambda: True)
    captured = rotary(table, positions, 8, 32)
    assert captured is not kept and torch.equal(captured, kept)
    rotary(table, positions[:4], 8, 32)
    assert len(module._TURNS) == 1


def test_inference_tensors_have_no_version_and_are_not_kept(table):
    with torch.inference_mode():
        positions = torch.arange(16)
        made = rotary(table, positions, 8, 32)
    assert not module._TURNS
    assert torch.equal(made, by_hand(table, positions, 8, 32))


def test_what_is_made_in_inference_mode_serves_training(table):
    positions = torch.arange(16)
    with torch.inference_mode():
        made = rotary(table, positions, 8, 32)
    assert not made.is_inference()
    assert rotary(table, positions, 8, 32) is made


def test_a_rotating_program_follows_its_positions():
    program = programs.row_scale_rotary(head_dim=8)
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(16, 24, generator=g).bfloat16(), torch.randn(24, 32, generator=g).bfloat16()
    table, positions = codetta.rotary_table(64, 8), torch.arange(16)
    flat = {"r": [torch.rand(16, 1, generator=g)], "rope": [table, positions]}
    operands = [x for o in program.operands for x in flat[o.name]]
    with emulated() as backend:
        for _ in range(3):
            (made,) = backend.gemm(program, a, b, operands, None, False)[:1]
            (expected,) = REFERENCE.gemm(program, a, b, operands, None, False)[:1]
            torch.testing.assert_close(made, expected, atol=3e-2, rtol=2e-2)
            positions.add_(11)
