"""Eager calls that skip the checks and the dispatcher return what a checked call returns."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import codetta
from codetta import checked, errors
from codetta.language import Col, Index, Rotary, Row, Scalar, Tile, epilogue, rotate, rowsum
from codetta.language.functions import select


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(checked, "_CHECKED", {})


@epilogue
def everything(acc, t: Tile, w: Row, r: Col, s: Scalar, i: Index, rope: Rotary):
    x = rotate(acc * s, rope, head_dim=4, heads=1) + t * w
    return {"x": x, "sum": rowsum(x * r), "chosen": select(x, i)}


@epilogue
def scaled(acc, s: Scalar):
    return acc * s


def arguments(lead: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32):
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    operands = {
        "t": random(*lead, 8),
        "w": random(8),
        "r": random(*lead),
        "s": 0.5 + seed,
        "i": torch.randint(-1, 9, lead, generator=g),
        "rope": (codetta.rotary_table(16, 4), torch.arange(lead[-1])),
    }
    return random(*lead, 6), random(6, 8), operands


def cold(*args, **named):
    """The call with all checks."""
    checked._CHECKED.clear()
    return codetta.gemm(*args, **named)


def equal(x, y) -> bool:
    return all(torch.equal(p, q) and p.shape == q.shape for p, q in zip(x, y, strict=True))


@pytest.mark.parametrize("lead", [(5,), (2, 5), (3, 1, 5)])
@pytest.mark.parametrize("raw", [False, True])
def test_a_warm_call_returns_what_a_checked_one_does(lead, raw):
    for seed in range(4):
        a, b, operands = arguments(lead, seed)
        warm = codetta.gemm(a, b, everything, raw=raw, **operands)
        assert len(checked._CHECKED) == 1, "nothing was remembered"
        expected = cold(a, b, everything, raw=raw, **operands)
        assert type(warm) is type(expected)
        flat = [x for x in warm if isinstance(x, torch.Tensor)]
        assert equal(flat, [x for x in expected if isinstance(x, torch.Tensor)])
        codetta.gemm(a, b, everything, raw=raw, **operands)


def test_warm_gradients_are_those_of_a_checked_call():
    a, b, operands = arguments((5,), 0)
    leaves = [a, b, operands["t"], operands["w"], operands["r"]]
    for x in leaves:
        x.requires_grad_()

    def gradients():
        out = codetta.gemm(a, b, everything, **operands)
        return torch.autograd.grad(out.x.square().sum() + out.sum.sum() + out.chosen.sum(), leaves)

    first = gradients()
    assert checked._CHECKED
    assert equal(first, gradients())


@pytest.mark.parametrize("first, second", [(2.0, 3.0), (0.0, -0.0), (1, True), (1.5, float("nan"))])
def test_numbers_are_told_apart(first, second):
    a, b = torch.eye(3), torch.eye(3)
    for number in (first, second, first):
        made = codetta.gemm(a, b, scaled, s=number)
        expected = a * number
        assert torch.equal(made.isnan(), expected.isnan())
        assert torch.equal(made.nan_to_num(9.0), expected.nan_to_num(9.0))
        assert torch.equal(torch.signbit(made), torch.signbit(expected)) or number != number


WRONG = {
    "missing": (errors.MissingOperand, lambda o: o.pop("w")),
    "unknown": (errors.UnknownOperand, lambda o: o.update(z=o["w"])),
    "shape": (errors.OperandShape, lambda o: o.update(w=o["w"][:-1])),
    "swapped": (errors.OperandShape, lambda o: o.update(w=o["r"], r=o["w"])),
    "dtype": (errors.OperandDtype, lambda o: o.update(i=o["r"])),
    "list": (errors.NotATensor, lambda o: o.update(t=[1.0])),
    "none": (errors.NotATensor, lambda o: o.update(w=None)),
    "rope": (errors.NotATensor, lambda o: o.update(rope=o["t"])),
    "device": (errors.DeviceMismatch, lambda o: o.update(t=o["t"].to("meta"))),
    "sparse": (errors.UnsupportedTensor, lambda o: o.update(t=o["t"].to_sparse())),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_after_a_warm_call_is_still_named(name):
    error, change = WRONG[name]
    a, b, operands = arguments((5,), 0)
    for _ in range(2):
        codetta.gemm(a, b, everything, **operands)
    change(operands)
    for _ in range(2):
        with pytest.raises(error):
            codetta.gemm(a, b, everything, **operands)


def test_a_wrong_matrix_after_a_warm_call_is_still_named():
    a, b = torch.randn(5, 6), torch.randn(6, 8)
    codetta.gemm(a, b)
    for wrong, error in (
        ((a, b[:-1]), errors.InnerMismatch),
        ((a, b.double()), errors.DtypeMismatch),
        ((a.int(), b.int()), errors.UnsupportedDtype),
        ((a, b.to("meta")), errors.DeviceMismatch),
        ((a, None), errors.NotATensor),
    ):
        with pytest.raises(error):
            codetta.gemm(*wrong)
    with pytest.raises(errors.BadTile):
        codetta.gemm(a, b, tile=(4, 0))
    with torch.enable_grad(), pytest.raises(errors.RawNeedsNoGrad):
        codetta.gemm(a, b, raw=True)
        codetta.gemm(a.requires_grad_(), b, raw=True)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_whatever_watches_the_dispatcher_sees_the_operator():
    a, b = torch.randn(5, 6), torch.randn(6, 8)
    for _ in range(2):
        codetta.gemm(a, b)
    with Seen() as seen:
        codetta.gemm(a, b)
    assert "codetta::gemm" in seen.names
    with torch.profiler.profile() as profile:
        codetta.gemm(a, b)
    assert "codetta::gemm" in {event.name for event in profile.events()}


def test_autocast_and_transforms_hold_for_warm_calls():
    a, b = torch.randn(5, 6), torch.randn(6, 8)
    for _ in range(2):
        assert codetta.gemm(a, b).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert codetta.gemm(a, b).dtype is torch.bfloat16
    with pytest.raises(errors.TransformRefused):
        torch.func.vmap(lambda x: codetta.gemm(x, b))(torch.stack([a, a]))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, a)
        with pytest.raises(errors.TransformRefused):
            codetta.gemm(dual, b)


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(checked, "_KEPT", 4)
    b = torch.randn(6, 8)
    for m in range(1, 20):
        codetta.gemm(torch.randn(m, 6), b)
    assert 0 < len(checked._CHECKED) <= 4


def test_empty_calls_and_subclasses_are_checked_every_time():
    b = torch.randn(6, 8)
    assert codetta.gemm(torch.randn(0, 6), b).shape == (0, 8)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        codetta.gemm(torch.empty(5, 6), torch.empty(6, 8))
    assert not checked._CHECKED
