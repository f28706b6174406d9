"""codetta.gemm returns what the program says: any shape, stride and dtype, tile by tile."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers.cases import CASES, inputs
from helpers.mutation import MUTANTS, fails_when_broken, wrong_tile
from helpers.oracle import execution
from helpers.values import as_dict, check_values
from hypothesis import given, settings
from hypothesis import strategies as st

import codetta
from codetta.backends.layout import results
from codetta.language.types import Kind

NAMES = list(CASES)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_within_the_error_budget(backend, name, dtype):
    program = CASES[name]
    check_values(program, *inputs(program, (7,), 3, 19, dtype))


@pytest.mark.parametrize("name", ["rms", "gated_halves", "cross_entropy", "column_sums", "total"])
def test_the_check_of_values_fails_on_broken_kernels(name):
    program = CASES[name]
    arguments = inputs(program, (12,), 4, 8, torch.bfloat16)
    check_values(program, *arguments)
    if name == "total":  # adding rows in another order is no mistake
        arguments = inputs(program, (2, 6), 4, 8, torch.bfloat16)
    fails_when_broken(lambda: check_values(program, *arguments))


LEADS = st.sampled_from([(), (0,), (1,), (7,), (129,), (2, 3), (2, 0, 3)])
LAYOUTS = st.sampled_from(["plain", "transposed", "expanded", "sliced"])


def laid_out(x, layout):
    """The same or other values of x's shape with unusual strides."""
    if x.ndim < 2 or layout == "plain":
        return x
    if layout == "transposed":
        return x.mT.contiguous().mT
    if layout == "expanded":
        return x[..., :1].expand(x.shape) if x.shape[-1] else x
    return torch.cat((x, x), dim=-1)[..., ::2]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(NAMES),
    lead=LEADS,
    units=st.sampled_from([0, 1, 3, 13]),
    k=st.sampled_from([0, 1, 7]),
    dtype=st.sampled_from(DTYPES),
    layouts=st.tuples(LAYOUTS, LAYOUTS, LAYOUTS),
    tile=st.sampled_from([None, (1, 1), (3, 2), (500, 500)]),
)
def test_any_shape_and_stride(name, lead, units, k, dtype, layouts, tile):
    program = CASES[name]
    if lead and 0 in lead and name == "column_sums":
        lead = (1,)  # the mean over no rows and their maximum are not numbers
    a, b, operands = inputs(program, lead, units, k, dtype)
    a, b = laid_out(a, layouts[0]), laid_out(b, layouts[1])
    operands = {
        key: laid_out(x, layouts[2]) if isinstance(x, torch.Tensor) else x
        for key, x in operands.items()
    }
    tile = tile and (tile[0], tile[1] * program.granule)
    check_values(program, a, b, operands, tile)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_left_as_they_were(name):
    program = CASES[name]
    a, b, operands = inputs(program, (5,), 2, 3, torch.float32)
    tensors = [a, b, *(x for x in operands.values() if isinstance(x, torch.Tensor))]
    before = [x.clone() for x in tensors]
    differentiated = [x.requires_grad_() for x in tensors if x.is_floating_point()]
    out = as_dict(program, codetta.gemm(a, b, program, **operands))
    sum(x.sum() for x in out.values()).backward()
    assert len(differentiated) >= 2
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


# ------------------------------------------------------------------------------------- tiles
# Heads are counted from the first column of the matrix, so a tile alone does not know its own.
REDUCING = [n for n, p in CASES.items() if p.reductions and n != "rotated_partly"]


def columns_of_tile(program, n, tile_n, at):
    """Columns of tile number ``at``: adjacent ones, or of both halves of N where these pair up."""
    if not program.uses_halves:
        return torch.arange(at * tile_n, min((at + 1) * tile_n, n))
    first = torch.arange(at * tile_n // 2, min((at + 1) * tile_n, n) // 2)
    return torch.cat((first, first + n // 2))


def scaled(columns, width, n):
    """Columns of an array of ``width`` N that lie in a tile with these columns of the accumulator.

    Where both halves of N pair up, an array half as wide holds one value per pair.
    """
    if width == 1:
        return columns
    if width < 1:
        group = int(1 / width)
        halved = columns[: len(columns) // 2]
        return columns[::group] // group if columns.diff().le(1).all() else halved
    return torch.stack([columns * int(width) + i for i in range(int(width))], 1).reshape(-1)


def on_one_tile(program, a, b, operands, rows, columns):
    """Raw results of the program run on this part of the matrix alone, as a single tile."""
    n = b.shape[1]
    part = {}
    for o in program.operands:
        x = operands[o.name]
        if o.kind is Kind.TILE:
            part[o.name] = x[rows][:, scaled(columns, o.width, n)]
        elif o.kind is Kind.ROW:
            part[o.name] = x[scaled(columns, o.width, n)]
        elif o.kind is Kind.COL:
            part[o.name] = x[rows]
        elif o.kind is Kind.INDEX:  # where the column lies in the tile, or nowhere
            hit = x[rows, None] == columns
            part[o.name] = torch.where(hit.any(1), hit.int().argmax(1), -1)
        else:
            part[o.name] = x
    tile = (10**3, 10**3 * program.granule)
    outputs, partials = execution(program, a[rows], b[:, columns], part, tile=tile)
    raw = [
        partials[e.name].parts if e.components else outputs[e.name] for e in results(program, True)
    ]
    return named_parts(program, raw)


def named_parts(program, raw):
    """Raw results by entry and name of the component, "" for a store."""
    entries = results(program, raw=True)
    values = [raw] if isinstance(raw, torch.Tensor) else list(raw)
    found = {}
    for entry, value in zip(entries, values, strict=True):
        parts = (value,) if isinstance(value, torch.Tensor) else tuple(value)
        assert len(parts) == max(1, len(entry.components))
        for component, part in zip(entry.components or ("",), parts, strict=True):
            found[entry, component] = part
    return found


def check_partials(program, a, b, operands, tile):
    """Raw results of all tiles are those of each tile alone."""
    m, n = a.shape[0], b.shape[1]
    whole = named_parts(program, codetta.gemm(a, b, program, raw=True, tile=tile, **operands))
    for (entry, _), value in whole.items():
        assert list(value.shape) == entry.shape(m, n, tile), entry.name
    for i in range(-(-m // tile[0])):
        rows = torch.arange(i * tile[0], min((i + 1) * tile[0], m))
        for j in range(-(-n // tile[1])):
            columns = columns_of_tile(program, n, tile[1], j)
            alone = on_one_tile(program, a, b, operands, rows, columns)
            for (entry, component), value in whole.items():
                where = {
                    "m": rows, "tm": torch.tensor([i]), "tn": torch.tensor([j]),
                    "n": scaled(columns, entry.width, n),
                }  # fmt: skip
                for axis, name in enumerate(entry.axes):
                    value = value.index_select(axis, where[name])
                torch.testing.assert_close(
                    value, alone[entry, component], msg=f"{entry.name} of tile {i}, {j}"
                )


@pytest.mark.parametrize("tile", [(1, 2), (2, 3), (4, 1), (100, 100)], ids=str)
@pytest.mark.parametrize("name", REDUCING)
def test_raw_partials_are_the_reductions_of_the_tiles(wide_backend, name, tile):
    program = CASES[name]
    arguments = inputs(program, (7,), 5, 3)
    tile = (tile[0], tile[1] * program.granule)
    check_partials(program, *arguments, tile)


@pytest.mark.parametrize("name", ["rms", "cross_entropy", "column_sums"])
def test_the_check_of_partials_fails_on_broken_kernels(name):
    program = CASES[name]
    arguments = inputs(program, (8,), 8, 3)
    tile = (2, 2 * program.granule)
    check = partial(check_partials, program, *arguments, tile)
    fails_when_broken(check, (*MUTANTS, wrong_tile))


@pytest.mark.parametrize("tile", [(1, 1), (3, 2), (4, 5), (1000, 1000)], ids=str)
@pytest.mark.parametrize("name", REDUCING)
def test_finalized_results_do_not_depend_on_the_tile(wide_backend, name, tile):
    program = CASES[name]
    a, b, operands = inputs(program, (7,), 5, 3)
    tile = (tile[0], tile[1] * program.granule)
    ours = as_dict(program, codetta.gemm(a, b, program, tile=tile, **operands))
    theirs = as_dict(program, codetta.gemm(a, b, program, **operands))
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-12, atol=1e-12)
