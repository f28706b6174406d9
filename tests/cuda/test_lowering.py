"""Programs lowered to QuACK's forms compute what the language says: emulated, without a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.cases import CASES, inputs
from helpers.emulation import emulated

from codetta import programs
from codetta.backends.calls import REFERENCE
from codetta.backends.cuda import assembly
from codetta.backends.cuda.launch import explain
from codetta.backends.cuda.lowering import lower
from codetta.backends.cuda.rules import LOWERING, NotLowerable
from codetta.backends.layout import results
from codetta.language import Index, Program, Row, Tile, epilogue, exp, log, rowsum
from codetta.language.functions import (
    colmax,
    colsum,
    logsumexp,
    maximum,
    minimum,
    relu,
    rowmax,
    rowmean,
    select,
    unpack,
)
from codetta.language.types import Kind

CATALOG = {
    e.name: e.program
    for e in programs.catalog().values()
    if e.program.has_acc and e.family != "fp8"  # tests/gemm/test_fp8.py
}
PROGRAMS = CATALOG | {f"case_{name}": program for name, program in CASES.items()}
LOWERED = [name for name, program in PROGRAMS.items() if explain(program) is None]


def call(program: Program, m: int, n: int, k: int, dtype: torch.dtype, seed: int = 0):
    """a, b and the flat operands, as the operators get them."""
    units = -(-n // program.granule)
    a, b, named = inputs(program, (m,), units, k, dtype, seed)
    flat = []
    for o in program.operands:
        x = named[o.name]
        if o.kind is Kind.ROTARY:
            flat += [x[0].float(), x[1]]
        elif o.kind is Kind.TILE:
            flat.append(x)
        elif o.kind is Kind.INDEX:
            flat.append(torch.where(torch.arange(m) % 5 == 3, -100, x)[:, None])
        else:
            shape = {Kind.ROW: (1, -1), Kind.COL: (-1, 1), Kind.SCALAR: (1, 1)}[o.kind]
            flat.append(x.float().reshape(shape))
    return a, b, flat


def agrees(name: str, out: torch.Tensor, ref: torch.Tensor) -> None:
    """Within a few roundings, by norm; equal NaN and infinities."""
    assert out.shape == ref.shape and out.dtype == ref.dtype, (name, out.shape, ref.shape)
    finite = ref.isfinite()
    assert torch.equal(out[~finite].nan_to_num(7.0), ref[~finite].nan_to_num(7.0)), name
    out, ref = out[finite].double(), ref[finite].double()
    eps = 2e-5 if out.numel() == 0 or ref.dtype is torch.float32 else 2e-2
    assert (out - ref).norm() <= eps * ref.norm() + 1e-6, name


@pytest.mark.parametrize("name", LOWERED)
@pytest.mark.parametrize("m, n, k", [(130, 200, 24), (256, 384, 16), (1, 24, 5), (77, 203, 51)])
def test_an_emulated_kernel_computes_the_program(name, m, n, k):
    program = PROGRAMS[name]
    a, b, operands = call(program, m, n, k, torch.bfloat16)
    with emulated() as backend:
        ours = backend.gemm(program, a, b, operands, None, False)
        assert all(c is not None for c in backend._calls.values())
    theirs = REFERENCE.gemm(program, a, b, operands, None, False)
    for out, mine, ref in zip(program.outputs, ours, theirs, strict=True):
        store = ref.dtype is not torch.float32
        agrees(out.name, mine, ref) if not store else agrees(out.name, mine.bfloat16(), ref)


@pytest.mark.parametrize("name", [n for n in LOWERED if PROGRAMS[n].finals])
def test_raw_partials_are_those_of_the_tiles(name):
    program = PROGRAMS[name]
    a, b, operands = call(program, 130, 200, 24, torch.float16)
    with emulated() as backend:
        ours = backend.gemm(program, a, b, operands, None, True)
        (made,) = backend._calls.values()
    theirs = iter(REFERENCE.gemm(program, a, b, operands, made.config.tile, True))
    mine = iter(ours)
    for result in results(program, True):
        for component in result.components or ("",):
            x, ref = next(mine), next(theirs)
            if component == "value":  # a select is one value per row, whatever the tile
                x, ref = x.sum(1), ref.sum(1)
            agrees(f"{result.name} {component}", x, ref)
    memories = [x.untyped_storage().data_ptr() for x in ours]
    assert len(set(memories)) == len(memories), "results share memory"


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("name", LOWERED)
def test_a_bound_call_takes_vectors_flat_where_it_says_so(name, raw):
    """And gives the same bits, of other operands, too."""
    program = PROGRAMS[name]
    with emulated() as backend:
        for seed in (0, 1):
            a, b, operands = call(program, 77, 203, 16, torch.bfloat16, seed)
            expected = backend.gemm(program, a, b, operands, None, raw)
            if seed == 0:
                run, flat = backend.gemm_bound(program, a, b, operands, None, raw)
            given = [x.reshape(-1) if i in flat else x for i, x in enumerate(operands)]
            found = run(a, b, given)
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert all(1 in operands[i].shape for i in flat)


def test_vectors_that_only_the_kernel_reads_are_taken_flat():
    program = CASES["column_sums"]
    a, b, operands = call(program, 77, 203, 16, torch.bfloat16)
    with emulated() as backend:
        raw, final = (
            backend.gemm_bound(program, a, b, operands, None, r).flat for r in (True, False)
        )
    assert raw == {0} and not final


@pytest.mark.parametrize("masked", [True, False])
def test_edges_leak_into_sums_unless_masked(masked, monkeypatch):
    @epilogue
    def live(acc, w: Row, t: Tile):
        return {"s": colsum(acc + exp(w)), "r": rowsum(exp(acc) + t)}

    a, b, operands = call(live, 130, 200, 24, torch.bfloat16)
    with emulated() as backend:
        if not masked:  # as if nothing were ragged
            recorded = assembly.lower
            monkeypatch.setattr(assembly, "lower", lambda p, d, *_, **__: recorded(p, d))
        ours = backend.gemm(live, a, b, operands, None, False)
    reference = REFERENCE.gemm(live, a, b, operands, None, False)
    for x, ref in zip(ours, reference, strict=True):
        if masked:
            agrees("sum", x, ref)
        else:
            with pytest.raises(AssertionError):
                agrees("sum", x, ref)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities_are_those_of_pytorch(value):
    @epilogue
    def extremes(acc, t: Tile, target: Index):
        x = acc + t
        lse, mean = logsumexp(x, acc)
        return {
            "top": rowmax(x), "col_top": colmax(x), "lse": lse, "mean": mean,
            "chosen": select(x, target), "larger": maximum(x, acc), "positive": relu(x),
            "sum": rowsum(x), "smaller": minimum(x, 0.0), "row_mean": rowmean(x),
        }  # fmt: skip

    a, b, (t, _) = call(extremes, 130, 200, 24, torch.bfloat16)
    t[3, 5] = t[77, 190] = value
    t[9] = value
    operands = [t, torch.full((130, 1), 5)]
    with emulated() as backend:
        ours = backend.gemm(extremes, a, b, operands, None, False)
    theirs = REFERENCE.gemm(extremes, a, b, operands, None, False)
    for out, x, ref in zip(extremes.outputs, ours, theirs, strict=True):
        agrees(out.name, x, ref)


@pytest.mark.parametrize("layout", ["m-major", "pitched", "shifted", "expanded", "odd k"])
def test_any_strides_are_accepted(layout):
    program = CATALOG["residual_ssq"]
    a, b, (residual,) = call(program, 130, 200, 24, torch.bfloat16)
    if layout == "m-major":
        a, b, residual = (x.t().contiguous().t() for x in (a, b, residual))
    elif layout == "pitched":
        a, b, residual = (torch.cat((x, x), 1)[:, : x.shape[1]] for x in (a, b, residual))
    elif layout == "shifted":
        a, b, residual = (torch.cat((x, x), 1)[:, 1 : x.shape[1] + 1] for x in (a, b, residual))
    elif layout == "expanded":
        a, residual = a[:1].expand(130, -1), residual[:, :1].expand(-1, 200)
    else:
        a, b = a[:, :23], b[:23]
    with emulated() as backend:
        ours = backend.gemm(program, a, b, [residual], None, False)
    for x, ref in zip(ours, REFERENCE.gemm(program, a, b, [residual], None, False), strict=True):
        agrees(layout, x, ref)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_accumulates_in_place(dtype):
    a, b, _ = call(CATALOG["identity"], 130, 200, 24, torch.bfloat16)
    target = torch.randn(130, 200).to(dtype)
    expected = target.clone()
    REFERENCE.gemm_accumulate_(expected, a, b)
    with emulated() as backend:
        backend.gemm_accumulate_(target, a, b)
    agrees("target", target, expected)


# ------------------------------------------------------------------------------------- identity
def test_different_programs_have_different_sources():
    """QuACK keys kernels by this text; quack-kernels 0.6.5 gave closures of exp and log one key."""

    def made(function):
        @epilogue
        def same(acc):
            return function(acc)

        return same

    first, second = made(exp), made(log)
    assert first.digest != second.digest
    texts = {lower(p, d).source for p in (first, second) for d in ("bf16", "fp16")}
    assert len(texts) == 4


def test_equal_programs_have_equal_sources():
    def made():
        @epilogue
        def same(acc, w: Row):
            return acc * w

        return same

    assert lower(made(), "bf16").source == lower(made(), "bf16").source


# -------------------------------------------------------------------------------- what is refused
def test_every_primitive_has_a_lowering():
    assert list(LOWERING.missing()) == []


def test_what_quack_cannot_carry_is_named():
    reasons = {n: r for n, p in PROGRAMS.items() if (r := explain(p)) is not None}
    assert reasons == REFUSED


#: These run as a plain GEMM and one more kernel.
REFUSED = {
    "qk_norm_rotary": "group_sum: a group's columns lie in several threads",
    "case_gated_halves": "unpack of pairs 'halves': only adjacent columns share a thread",
    "case_gated_halves_4": "unpack of pairs 'halves:4': only adjacent columns share a thread",
    "case_expanded": "values of widths 1/2, 1, 2 in one tile",
    "case_swapped_halves": "unpack of pairs 'halves': only adjacent columns share a thread",
    "case_rotated": "rotate of pairs 'halves': only adjacent columns share a thread",
    "case_head_norm": "group_sum: a group's columns lie in several threads",
}


def test_a_refused_program_still_runs():
    program = CATALOG["qk_norm_rotary"]
    a, b, operands = call(program, 130, 24, 24, torch.bfloat16)
    with emulated() as backend:
        ours = backend.gemm(program, a, b, operands, None, False)
    theirs = REFERENCE.gemm(program, a, b, operands, None, False)
    for out, x, ref in zip(program.outputs, ours, theirs, strict=True):
        agrees(out.name, x, ref)


def test_other_pairs_than_adjacent_are_refused():
    @epilogue
    def halves(acc):
        g, u = unpack(acc, "halves")
        return g * u

    with pytest.raises(NotLowerable, match="halves"):
        lower(halves, "bf16")
