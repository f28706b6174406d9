"""A program that is two kernels is cut where it rounds, and its second kernel reads 16 bits."""

import pytest
import torch
from helpers.fused import running

import codetta
from codetta.backends.cuda import cut, launch
from codetta.backends.cuda.cut import cut_of
from codetta.backends.layout import parsed
from codetta.language import (
    Col,
    Rotary,
    Row,
    Tile,
    group_sum,
    rotate,
    round_to,
    rowsum,
    rsqrt,
    store,
    ungroup,
    where,
)
from codetta.tuning.calls import recorded

BF16 = torch.bfloat16
HEAD = 16


@codetta.epilogue
def head_norm(acc, scale: Col, weight: Row, normed: Row, rope: Rotary):
    z = acc * scale
    rounded = round_to(z)
    r = rsqrt(group_sum(rounded * rounded, HEAD) * (1.0 / HEAD) + 1e-6)
    y = where(normed > 0.5, rounded * ungroup(r, HEAD) * weight, z)
    return {"y": rotate(y, rope, head_dim=HEAD, heads=3), "z": z, "total": rowsum(y)}


@codetta.epilogue
def never_rounded(acc, bias: Row):
    z = acc + bias
    return {"y": z * ungroup(group_sum(z * z, HEAD), HEAD), "z": z}


@codetta.epilogue
def another_way(acc, bias: Row):
    z = round_to(acc + bias)
    return {"y": z * ungroup(group_sum(z * z, HEAD), HEAD) + acc, "z": z}


@codetta.epilogue
def wide_store(acc, bias: Row):
    z = acc + bias
    rounded = round_to(z)
    y = rounded * ungroup(group_sum(rounded * rounded, HEAD), HEAD)
    return {"y": y, "z": store(z, "fp32")}


@codetta.epilogue
def nothing_stored(acc, x: Tile):
    rounded = round_to(acc - x)
    return rounded * ungroup(group_sum(rounded, HEAD), HEAD) + x


def operands():
    torch.manual_seed(1)
    m, n, k = 37, 5 * HEAD, 24
    table = torch.randn(m, HEAD)
    return {
        "a": torch.randn(m, k).to(BF16), "b": torch.randn(n, k).to(BF16).t(),
        "scale": torch.rand(m) + 0.5, "weight": torch.randn(n),
        "normed": (torch.arange(n) < 3 * HEAD).float(), "rope": (table, torch.arange(m)),
    }  # fmt: skip


def test_the_product_stores_what_the_program_rounds():
    found = cut_of(head_norm, BF16)
    assert found is not None and found.kept == 1
    assert [o.name for o in found.first.operands] == ["scale"]
    assert [o.name for o in found.second.operands] == ["stored", "weight", "normed", "rope"]
    assert [o.name for o in found.second.outputs] == ["y", "total"]
    assert found.first_takes == (0,) and found.second_takes == (1, 2, 3, 4)
    assert launch.explain(head_norm) is not None and launch.explain(found.first) is None


def both(program):
    """What the reference gives, and the backend that runs."""
    given = operands()
    if program is nothing_stored:
        given = {n: given[n] for n in "ab"} | {"x": torch.randn(37, 5 * HEAD).to(BF16)}
    a, b = given.pop("a"), given.pop("b")
    found = codetta.gemm(a, b, program, **given)
    with codetta.use_backend("reference"):
        return codetta.gemm(a, b, program, **given), found


@pytest.mark.parametrize("program", [head_norm, nothing_stored], ids=lambda p: p.name)
def test_both_halves_give_the_program(fused, program):
    """What is stored in between is what the program rounds; one more value is read rounded."""
    expected, found = both(program)
    check(program, expected, found)


def check(program, expected, found):
    names = [o.name for o in program.outputs] if program is head_norm else [None]
    for name in names:
        got, want = (getattr(x, name) if name else x for x in (found, expected))
        assert got.dtype == want.dtype
        assert float((got - want).norm()) < 4e-3 * float(want.norm())


def test_the_accumulator_is_not_stored_in_fp32(monkeypatch):
    stored = []
    original = launch.pointwise.run

    def run(program, tensors, *rest):
        stored.append(tensors[0].dtype)
        return original(program, tensors, *rest)

    monkeypatch.setattr(launch.pointwise, "run", run)
    given = operands()
    with running("emulated"):
        codetta.gemm(given.pop("a"), given.pop("b"), head_norm, **given)
    assert stored[0] is BF16


@pytest.mark.parametrize("program", [never_rounded, another_way, wide_store], ids=lambda p: p.name)
def test_what_is_not_rounded_or_needs_the_accumulator_otherwise_is_not_cut(program):
    assert cut_of(program, BF16) is None


def test_programs_on_other_matrices_are_not_cut():
    assert cut_of(head_norm, torch.float16) is not None
    assert cut_of(head_norm, torch.float8_e4m3fn) is None


def test_the_kernel_that_is_compiled_beforehand_is_the_first_half():
    given = {
        n: tuple(t.to("meta") for t in x) if isinstance(x, tuple) else x.to("meta")
        for n, x in operands().items()
    }
    a, b = given.pop("a"), given.pop("b")
    (call,) = recorded(lambda: codetta.gemm(a, b, head_norm, **given))
    half = call.without_epilogue()
    assert half.program == cut_of(parsed(head_norm.line), BF16).first
    assert [x.shape for x in half.operands] == [given["scale"][:, None].shape]


def test_a_broken_cut_is_seen(monkeypatch):
    made = cut.Cut.results
    monkeypatch.setattr(cut.Cut, "results", lambda self, stored, rest: made(self, -stored, rest))
    with running("emulated"):
        expected, found = both(head_norm)
    with pytest.raises(AssertionError):
        check(head_norm, expected, found)
