"""Every ready program against its plain PyTorch formula, in every dtype and on odd shapes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from program_oracle import ORACLES, inputs, run

import codetta.programs
from codetta.language import Program
from codetta.language.meaning import FP8
from codetta.language.vjp import vjp
from codetta.programs import catalog

NAMES = list(catalog())
SHAPES = [(1, 16), (7, 16), (0, 16), (5, 32)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def outputs_of(name, m, n, dtype):
    """(program's, fp64 formula's, dtype formula's) outputs on the same inputs."""
    program = catalog()[name].program
    acc, operands = inputs(program, m, n, dtype)
    ours = run(program, acc, dtype=dtype, shape=(m, n), **operands)
    oracle = ORACLES[name]

    def formula(to):
        def cast(x):
            if isinstance(x, tuple):
                return tuple(map(cast, x))
            return x.to(to) if x.is_floating_point() else x

        first = () if acc is None else (cast(acc),)
        return oracle(*first, **{k: cast(v) for k, v in operands.items()})

    return vars(ours), formula(torch.float64), formula(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_equals_its_formula_in_fp64(name, shape):
    ours, exact, _ = outputs_of(name, *shape, torch.float64)
    assert list(ours) == list(exact)
    for key, value in exact.items():
        assert ours[key].shape == value.shape
        if value.dtype in FP8:
            assert ours[key].dtype == value.dtype
            assert torch.equal(ours[key].double(), value.double())
            continue
        torch.testing.assert_close(ours[key], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", NAMES)
def test_error_is_within_the_budget(name, dtype):
    ours, exact, plain = outputs_of(name, 33, 48, dtype)
    for key, value in exact.items():
        stored = value.dtype if value.dtype in FP8 else dtype
        value = value.double()
        allowed = 2 * (plain[key].double() - value).norm()
        allowed += 2 * torch.finfo(stored).eps * value.norm()
        assert (ours[key].double() - value).norm() <= allowed, key


@pytest.mark.parametrize("name", NAMES)
def test_result_does_not_depend_on_the_tile(name):
    program = catalog()[name].program
    acc, operands = inputs(program, 7, 32, torch.float64)
    results = [
        vars(run(program, acc, tile=tile, dtype=torch.float64, shape=(7, 32), **operands))
        for tile in ((2, 8), (128, 128))
    ]
    for key in results[0]:
        first, second = (r[key].to(torch.float64) for r in results)
        torch.testing.assert_close(first, second, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_text_round_trip_of_program_and_backward(name):
    program = catalog()[name].program
    kinds = ("Tile", "Row", "Col", "Scalar")
    wrt = ["acc"] * program.has_acc + [o.name for o in program.operands if o.kind.value in kinds]
    for p in (program, *vjp(program, wrt).passes):
        assert Program.parse(str(p)) == p


def test_catalog_names_everything_public_and_only_that():
    assert set(catalog()) == set(codetta.programs.__all__) - {"Entry", "catalog", "recorded"}
    assert set(catalog()) == set(ORACLES)


def test_catalog_names_every_program_of_every_family():
    for family in {e.family for e in catalog().values()}:
        module = importlib.import_module(f"codetta.programs.{family}")
        for name, value in vars(module).items():
            cached = hasattr(value, "cache_info") and value.__module__ == module.__name__
            if isinstance(value, Program) or cached:
                assert name in catalog(), f"{family}.{name}"


def test_every_file_is_a_family():
    files = {p.stem for p in Path(codetta.programs.__file__).parent.glob("*.py")}
    assert files - {"__init__", "catalog"} == {e.family for e in catalog().values()}


@pytest.mark.parametrize("name", NAMES)
def test_entry_says_what_it_is(name):
    entry = catalog()[name]
    assert (
        entry.formula and "\n" not in entry.formula and len(entry.formula) <= 51
    )  # one line of 80 columns
    assert entry.doc.endswith(".")
    assert entry.is_factory == bool(entry.arguments)
    assert eval(entry.call, vars(codetta.programs)) == entry.program
    assert entry.program.name.endswith(name)


def test_factories_return_the_same_program():
    assert codetta.programs.softcap(50.0) is codetta.programs.softcap(50.0)
    assert codetta.programs.softcap(50.0) != codetta.programs.softcap(30.0)
