"""The fused backend computes every ready program: ragged, odd and strided, and the same each time.

On a GPU, and emulated without one.
"""

from __future__ import annotations

import pytest
import torch
from helpers.cases import CASES
from helpers.values import LAYOUTS, as_dict, call_of, check_rounded, check_values, flat

import codetta
from codetta import programs
from codetta.backends.cuda.launch import explain
from codetta.backends.layout import results

CATALOG = {
    e.name: e.program
    for e in programs.catalog().values()
    if e.program.has_acc and e.family != "fp8"  # of 16-bit operands
}
PROGRAMS = CATALOG | {f"case_{name}": program for name, program in CASES.items()}

#: (M, N, K); N is rounded up to the program's granule.
SHAPES = {
    "row": (1, 200, 64),
    "few": (7, 35, 19),
    "aligned": (256, 384, 128),
    "ragged": (129, 328, 40),
    "odd": (77, 203, 51),
    "tall": (1001, 139, 7),
}


every_program = pytest.mark.parametrize("name", PROGRAMS)
ready_program = pytest.mark.parametrize("name", CATALOG)


@pytest.mark.parametrize("shape", SHAPES)
@ready_program
def test_any_shape_is_within_the_error_budget(fused, name, shape):
    program = CATALOG[name]
    call = call_of(program, SHAPES[shape], torch.bfloat16)
    check_rounded(program, *call, check_values(program, *call))


@every_program
def test_fp16_is_within_the_error_budget(fused, name):
    check_values(PROGRAMS[name], *call_of(PROGRAMS[name], SHAPES["odd"], torch.float16))


@pytest.mark.parametrize("layout", LAYOUTS)
@ready_program
def test_any_layout_is_read_and_nothing_beside_it(fused, name, layout):
    """All but the plain arrays lie among NaN, which would show in the result."""
    program = CATALOG[name]
    for shape in ("ragged", "odd"):
        check_values(program, *call_of(program, SHAPES[shape], torch.bfloat16, layout))


@every_program
def test_the_same_call_gives_the_same_bits(fused, name):
    program = PROGRAMS[name]
    shape = (1001, 1000, 136) if fused == "cuda" else (130, 200, 24)
    a, b, operands = call_of(program, shape, torch.bfloat16)
    for raw in (False, True):
        first, *others = [flat(codetta.gemm(a, b, program, raw=raw, **operands)) for _ in range(3)]
        for again in others:
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@ready_program
def test_a_row_does_not_depend_on_the_rows_after_it(fused, name):
    """What the last tile holds beyond M, or other rows, reaches no row."""
    program, m = CATALOG[name], 129
    a, b, operands = call_of(program, (300, 203, 51), torch.bfloat16)
    whole = as_dict(program, codetta.gemm(a, b, program, **operands))
    first = {o.name: rows_of(o, operands[o.name], m) for o in program.operands}
    part = as_dict(program, codetta.gemm(a[:m], b, program, **first))
    for o in program.outputs:
        if program.nodes[o.node].type.has_rows:
            torch.testing.assert_close(part[o.name], whole[o.name][:m], rtol=1e-2, atol=1e-4)
            assert torch.equal(part[o.name].isfinite(), whole[o.name][:m].isfinite())


def rows_of(operand, x, m):
    if operand.kind.value == "Rotary":
        return x[0], x[1][:m]
    return x[:m] if operand.kind.value in ("Tile", "Col", "Index") else x


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@ready_program
def test_nan_and_infinity_spread_as_in_the_specification(fused, name, value):
    program = CATALOG[name]
    a, b, operands = call_of(program, SHAPES["odd"], torch.bfloat16)
    a[3, 5] = value
    for o in program.operands:
        if o.kind.value == "Tile":
            operands[o.name][40, 17] = value
    ours = as_dict(program, codetta.gemm(a, b, program, **operands))
    with codetta.use_backend("reference"):
        theirs = as_dict(program, codetta.gemm(a, b, program, **operands))
    for key, ref in theirs.items():
        for what in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(what(ours[key]), what(ref)), (key, what.__name__)
    if name != "softcap" or value != value:  # its bound is finite at infinity
        assert any(not x.isfinite().all() for x in theirs.values())


# ---------------------------------------------------------------------------------- partials
REDUCING = [n for n, p in PROGRAMS.items() if p.finals and n != "case_rotated_partly"]


@pytest.mark.parametrize("name", REDUCING)
def test_raw_partials_are_those_of_the_backends_own_tiles(fused, name):
    """Their number says which tile the backend chose; the specification is then run with it."""
    program = PROGRAMS[name]
    a, b, operands = call_of(program, (301, 440, 24), torch.float16)
    ours = components(program, codetta.gemm(a, b, program, raw=True, **operands))

    def specified(tile):
        with codetta.use_backend("reference"):
            raw = codetta.gemm(a, b, program, raw=True, tile=tile, **operands)
        return components(program, raw)

    tiles = [t for t in legal_tiles(program) if fits(program, ours, 301, b.shape[1], t)]
    assert any(agree(ours, specified(tile)) for tile in tiles), f"partials of none of {tiles}"


def components(program, raw):
    """(result, component) -> tensor. A selected value is summed over the tiles: one of them has it,
    and a kernel that writes it once need not say which."""
    values = iter(flat(raw))
    found = {}
    for result in results(program, True):
        for component in result.components or ("",):
            x = next(values)
            found[result, component] = x.sum(1) if component == "value" else x
    return found


def legal_tiles(program):
    sizes = [(m, n) for m in (64, 128, 192, 256, 320) for n in range(16, 257, 16)]
    return [t for t in sizes if t[1] % program.granule == 0]


def fits(program, made, m, n, tile) -> bool:
    return all(
        component == "value" or list(x.shape) == result.shape(m, n, tile)
        for (result, component), x in made.items()
    )


def agree(ours, theirs) -> bool:
    """Up to the order of sums, and a rounding in fp16."""
    return all(
        torch.allclose(x.double(), theirs[key].double(), 2e-3, 2e-3 * float(x.abs().max()))
        for key, x in ours.items()
    )


def test_ready_programs_are_one_kernel_each():
    """Guards the tests above: a program in two kernels would pass them as well."""
    assert {n for n, p in CATALOG.items() if explain(p) is not None} == {"qk_norm_rotary"}
