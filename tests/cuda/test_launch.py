"""Warm calls of the fused backend: what is kept, what is compiled, and what is refused when."""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager, nullcontext
from types import ModuleType

import pytest
import torch
from helpers.emulation import emulated

from codetta import programs
from codetta.backends.calls import REFERENCE
from codetta.backends.cuda import arrays, bound, launch, triton_kernels
from codetta.backends.cuda.launch import CudaBackend
from codetta.backends.cuda.pointwise import accumulator_loaded
from codetta.errors import ColdCapture, TooLarge
from codetta.language import Index, Row, Tile, epilogue, rowsum
from codetta.language.functions import select

RESIDUAL = programs.residual_ssq
COPY = accumulator_loaded(programs.identity)  # a Tile, rounded


def matrices(m: int, n: int = 136, k: int = 24):
    g = torch.Generator().manual_seed(m)
    return tuple(torch.randn(shape, generator=g).bfloat16() for shape in ((m, k), (k, n), (m, n)))


class Quack(ModuleType):
    """Stands in for the module that owns QuACK: compiles and launches nothing, and counts."""

    def __init__(self) -> None:
        super().__init__("quack")
        self.built: list[tuple[object, ...]] = []
        self.launched = 0
        self.matrices: list[torch.Tensor] = []

    def epilogue(self, source: str) -> str:
        return source

    def build(self, source, a, b, d, c, arguments, config, **options):
        self.built.append((source, config))
        return len(self.built)

    def launch(self, plan, a, b, d, c, arguments) -> None:
        self.launched += 1
        self.matrices = [x for x in (a, b, d, c) if x is not None]


@pytest.fixture
def quack(monkeypatch):
    """The real cache of kernels over counted compilations."""
    fake, package = Quack(), sys.modules["codetta.backends.cuda"]
    monkeypatch.setitem(sys.modules, "codetta.backends.cuda.quack", fake)
    monkeypatch.setattr(package, "quack", fake, raising=False)
    monkeypatch.delitem(sys.modules, "codetta.backends.cuda.plans", raising=False)
    plans = importlib.import_module("codetta.backends.cuda.plans")
    monkeypatch.setattr(package, "plans", plans, raising=False)
    yield fake
    sys.modules.pop("codetta.backends.cuda.plans", None)


@contextmanager
def capture():
    """As during the capture of a CUDA graph."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


# ----------------------------------------------------------------------------- what is kept
def test_a_new_number_of_rows_compiles_nothing(quack):
    backend = CudaBackend()
    for m in range(1, 200):
        a, b, residual = matrices(m)
        backend.gemm(RESIDUAL, a, b, [residual], None, True)
    assert len(quack.built) == len(set(quack.built)) <= 4  # by size of M, not by M
    assert quack.launched == 199


def test_equal_calls_share_a_description_and_others_do_not(quack):
    backend = CudaBackend()
    a, b, residual = matrices(16)
    for _ in range(3):
        backend.gemm(RESIDUAL, a, b, [residual], None, True)
    assert len(backend._calls) == 1
    for changed in (residual.float(), residual.t().contiguous().t()):
        backend.gemm(RESIDUAL, a, b, [changed], None, True)
    backend.gemm(RESIDUAL, a, b, [torch.cat((residual, residual), 1)[:, 1:137]], None, True)
    assert len(backend._calls) == 4


def test_a_warm_call_passes_no_pointer_that_the_mainloop_cannot_read(quack):
    """The second residual differs from the first in its address alone."""
    backend = CudaBackend()
    a, b, _ = matrices(16)
    memory = torch.zeros(16, 144, dtype=torch.bfloat16)
    for start in (0, 1, 0, 8):
        residual = memory[:, start : start + 136]
        backend.gemm(RESIDUAL, a, b, [residual], None, True)
        assert any(x.shape == residual.shape for x in quack.matrices)
        assert all(x.data_ptr() % 16 == 0 for x in quack.matrices)


def test_descriptions_are_bounded(quack, monkeypatch):
    monkeypatch.setattr(launch, "_CALLS_KEPT", 8)
    backend = CudaBackend()
    for m in range(1, 60):
        a, b, residual = matrices(m)
        for raw in (False, True):
            backend.gemm(RESIDUAL, a, b, [residual], None, raw)
    assert 0 < len(backend._calls) <= 8
    assert all(len(runs) <= 8 for runs in backend._runs)


def test_results_of_warm_calls_are_fresh_and_right():
    with emulated() as backend:
        for _ in range(3):
            a, b, residual = matrices(9)
            residual.normal_()
            first = backend.gemm(RESIDUAL, a, b, [residual], None, False)
            second = backend.gemm(RESIDUAL, a, b, [residual], None, False)
            expected = REFERENCE.gemm(RESIDUAL, a, b, [residual], None, False)
            for x, y, ref in zip(first, second, expected, strict=True):
                assert torch.equal(x, y) and x.data_ptr() != y.data_ptr()
                torch.testing.assert_close(x, ref, atol=5e-2, rtol=2e-2)
        assert len(backend._calls) == 1


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("n", [2, 6, 14, 18, 250, 258])
@pytest.mark.parametrize("layout", ["contiguous", "shifted"])
def test_half_width_stores_of_any_width(m, n, layout):
    """N / 2 is in general no multiple of the eight elements that a store writes at once."""
    a, b, _ = matrices(m, n)
    if layout == "shifted":
        a, b = (torch.cat((x, x), 1)[:, 1 : x.shape[1] + 1] for x in (a, b))
    with emulated() as backend:
        for _ in range(2):
            (made,) = backend.gemm(programs.swiglu, a, b, [], None, False)[:1]
    (expected,) = REFERENCE.gemm(programs.swiglu, a, b, [], None, False)[:1]
    assert made.shape == (m, n // 2) and made.is_contiguous()
    torch.testing.assert_close(made, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("m, n", [(1, 1), (1, 7), (5, 129), (2, 203)])
def test_stores_and_sums_of_odd_widths(m, n):
    @epilogue
    def scaled(acc, t: Tile, w: Row):
        x = acc * w + t
        return {"x": x, "s": rowsum(x)}

    a, b, t = matrices(m, n)
    operands = [t, torch.randn(1, n)]
    with emulated() as backend:
        for _ in range(2):
            made = backend.gemm(scaled, a, b, operands, None, False)
    for x, ref in zip(made, REFERENCE.gemm(scaled, a, b, operands, None, False), strict=True):
        assert x.is_contiguous()
        torch.testing.assert_close(x, ref, atol=5e-2, rtol=2e-2)


def test_rows_without_a_column_select_zero():
    @epilogue
    def chosen(acc, target: Index):
        return select(acc, target)

    a, b, _ = matrices(6)
    index = torch.tensor([0, 135, 136, -1, -100, 7])[:, None]
    with emulated() as backend:
        (made,) = backend.gemm(chosen, a, b, [index], None, False)
    (expected,) = REFERENCE.gemm(chosen, a, b, [index], None, False)
    torch.testing.assert_close(made, expected, atol=1e-3, rtol=1e-3)
    assert made[2:5].tolist() == [0.0, 0.0, 0.0]


# -------------------------------------------------------------------------------- CUDA graphs
def test_compiling_during_a_capture_is_an_error_and_a_warm_call_is_not(quack):
    backend = CudaBackend()
    a, b, residual = matrices(16)
    with capture(), pytest.raises(ColdCapture, match=RESIDUAL.name):
        backend.gemm(RESIDUAL, a, b, [residual], None, True)
    assert not quack.built and not quack.launched
    backend.gemm(RESIDUAL, a, b, [residual], None, True)
    with capture():
        backend.gemm(RESIDUAL, a, b, [residual], None, True)
    assert quack.launched == 2


@pytest.mark.parametrize("captured", [False, True])
def test_constants_are_kept_by_a_function_unless_it_is_made_during_a_capture(
    captured, quack, monkeypatch
):
    made: list[int] = []
    monkeypatch.setattr(arrays, "ones", lambda n, device: made.append(n) or torch.ones(n))
    backend = CudaBackend()
    a, b, residual = matrices(16)  # the last tile reaches beyond column 136: its sum is masked
    backend.gemm(RESIDUAL, a, b, [residual], None, False)
    with capture() if captured else nullcontext():
        backend.gemm(RESIDUAL, a, b, [residual], None, True)
    assert set(made) == {136}
    made.clear()
    for _ in range(2):
        backend.gemm(RESIDUAL, a, b, [residual], None, True)
    assert len(made) == (2 if captured else 0)


class Nothing:
    """A Triton function, and what it compiles to."""

    def __getitem__(self, grid):
        return lambda *arguments, **options: self


def test_triton_kernels_are_not_compiled_during_a_capture(monkeypatch):
    monkeypatch.setattr(triton_kernels, "_RECIPES", {})
    built: list[object] = []
    monkeypatch.setattr(triton_kernels, "build", lambda made: built.append(made) or Nothing())

    def call() -> None:
        x = torch.ones(4, 8, dtype=torch.bfloat16)
        triton_kernels.pointwise(COPY, [x], 4, 8, torch.bfloat16, torch.float32)

    with capture(), pytest.raises(ColdCapture, match=COPY.name):
        call()
    assert not built
    call()
    with capture():
        call()
    assert len(built) == 1


# ------------------------------------------------------------------------- devices and sizes
def test_a_call_runs_with_its_device_current(monkeypatch):
    entered: list[int] = []

    @contextmanager
    def device(index: int):
        entered.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)

    def run(a, b, operands):
        return [a]

    x = torch.ones(1)
    for index, expected in ((0, []), (1, [1])):
        made = bound.on_device(run, torch.device("cuda", index))
        assert made(x, x, ()) == [x]
        assert entered == expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert bound.on_device(run, torch.device("cuda", 0)) is run


@pytest.mark.parametrize("shape", [(2**31, 8, 8), (8, 2**31, 8), (8, 8, 2**31)])
def test_extents_beyond_32_bits_are_refused(shape, quack):
    m, n, k = shape
    like = torch.empty(1, dtype=torch.bfloat16, device="meta")
    a, b = like.expand(m, k), like.expand(k, n)
    with pytest.raises(TooLarge, match="identity"):
        CudaBackend().gemm(programs.identity, a, b, [], None, False)
    assert not quack.built


def test_columns_beyond_32_bits_are_refused_by_pointwise_kernels(monkeypatch):
    monkeypatch.setattr(triton_kernels, "_RECIPES", {})
    monkeypatch.setattr(triton_kernels, "build", lambda made: Nothing())

    def call(n: int) -> None:
        x = torch.empty(1, dtype=torch.bfloat16, device="meta").expand(2, n)
        triton_kernels.pointwise(COPY, [x], 2, n, torch.bfloat16, torch.float32)

    call(2**31 - 2**16)
    with pytest.raises(TooLarge, match=COPY.name):
        call(2**31 - 2**16 + 1)
