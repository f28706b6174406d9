"""The checks of the fused backend fail on broken kernels: emulated ones, broken in every place."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from helpers.fused import broken, running
from helpers.values import call_of, check_rounded, check_values

from codetta import programs
from codetta.backends.cuda import lowering
from codetta.language import Col, Row, Tile, colsum, epilogue, exp, rowsum

CATALOG = {
    e.name: e.program
    for e in programs.catalog().values()
    if e.program.has_acc and e.family != "fp8"
}
ONE_KERNEL = [n for n in CATALOG if n != "qk_norm_rotary"]
SHAPE = (160, 75, 51)


def check(program) -> None:
    with running("emulated"):
        call = call_of(program, SHAPE, torch.bfloat16)
        check_rounded(program, *call, check_values(program, *call))


def fails(program) -> bool:
    try:
        check(program)
    except AssertionError:
        return True
    return False


# ------------------------------------------------------------------- every result of every kernel
def a_tenth_off(x):
    return x * 1.1


def a_tile_skipped(x):
    """Rows from 128 on are as if nothing had been computed."""
    x = x.clone()
    x[128:] = 0.0
    return x


def rows_shuffled(x):
    return x.roll(1, 0)


MUTANTS = (a_tenth_off, a_tile_skipped, rows_shuffled)


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_every_broken_result_is_noticed(name):
    program = CATALOG[name]
    with broken(None, None) as results:
        check(program)
    assert results
    # The partials of a column are summed: their order is free.
    unordered = {s.name for s in lowering.lower(program, "bf16").sinks if s.over == "m"}
    for result in results:
        for mutant in MUTANTS:
            if mutant is rows_shuffled and result in unordered:
                continue
            with broken(result, mutant):
                assert fails(program), f"{result} {mutant.__name__} passes"


# ------------------------------------------------------------------------- mistakes in the source
#: (program, what is replaced in its generated source, by what)
MISTAKES = {
    "a forgotten row scale": ("row_scale", r"acc \* p_r", "acc * 1.0"),
    "a row scale on one lane only": ("row_scale_swiglu", r"acc\[1\] \* p_r", "acc[1] * 1.0"),
    "swapped lanes of a pair": ("row_scale_swiglu", r"\(F32\(v0\), F32\(v1\)\)", "(v1, v0)"),
    "swapped lanes of a packed pair": ("swiglu_backward", r"(F32\(v9\)), (F32\(v12\))", r"\2, \1"),
    "gate and up exchanged": ("swiglu_backward_unscaled", r"c\[0\]", "c[1]"),
    "a forgotten rounding": ("residual_ssq", r"\.to\(BFloat16\)", ""),
    "moments of what is not rounded": ("layernorm_statistics", r"(moments3': F32\()v1", r"\1v0"),
    "a wrong sign": ("rms_link_dgrad", r"v1 - v2", "v1 + v2"),
    "a column sum of another tile": ("rms_link_dgrad_frozen", r"F32\(acc\), F32\(p_x\)", "acc, c"),
    "a turn the other way": ("row_scale_rotary", r" - v1 \* rope", " + v1 * rope"),
    "turned columns of v": ("row_scale_rotary", r" > 0\.5", " > -1.0"),
    "a target that is not subtracted": ("cross_entropy_backward", r"- hit_target", "- 0.0"),
    "another row's maximum": ("row_scale_lse_target", r"6': \(F32\(v0\)", "6': (acc"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "wrong", "instead"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_the_generated_source_is_noticed(name, wrong, instead, monkeypatch):
    program, original = CATALOG[name], lowering.lower
    assert not fails(program)

    def lower(*arguments, **options):
        made = original(*arguments, **options)
        head, tail = made.source.split("\nepilogue = EpiMod(")
        changed, count = re.subn(wrong, instead, head)
        assert count or made.program is not program, f"nothing to replace in {head}"
        return dataclasses.replace(made, source=f"{changed}\nepilogue = EpiMod({tail}")

    monkeypatch.setattr(lowering, "lower", lower)
    assert fails(program)


# -------------------------------------------------------------------------------- ragged tiles
@epilogue
def live_over_columns(acc, r: Col):
    """Beyond N the accumulator is 0, and exp(0) r is not."""
    return {"x": acc, "s": rowsum(exp(acc) * r)}


@epilogue
def live_over_rows(acc, w: Row, t: Tile):
    return {"x": acc + t, "s": colsum(acc + exp(w))}


@pytest.mark.parametrize("program", [live_over_columns, live_over_rows], ids=lambda p: p.name)
def test_what_lies_beyond_a_ragged_tile_is_noticed_in_a_sum(program, monkeypatch):
    assert not fails(program)
    original = lowering.lower
    monkeypatch.setattr(lowering, "lower", lambda p, operand, *_, **__: original(p, operand))
    assert fails(program)
