"""Tensors that outlive a call are made once, on a thread whose allocations no pool takes."""

from __future__ import annotations

from threading import current_thread, main_thread

import pytest
import torch
from helpers.fused import running
from helpers.pools import left_by, like_a_gpu

import codetta
from codetta import checked, kept, programs
from codetta.backends.cuda import arrays, rotary, triton_prepare
from codetta.language import Scalar
from codetta.plan import PlanBuilder, evaluate, layouts

CPU = torch.device("cpu")
HEADS = {"head_dim": 6, "rotary_dim": 4, "heads": 3, "inverse": False}


def packed():
    """A Plan that packs rows of weights of sizes that no other test has, and weights."""
    p = PlanBuilder("packed_outside_of_pools")
    both = p.emit("stack_rows", p.weight("q", 18, 21), p.weight("v", 5, 21))
    p.output("w", p.emit("permute_rows", both, **HEADS) * p.row("gamma", 21))
    return p.build(), [torch.randn(n, 21) for n in (18, 5)] + [torch.randn(21)]


def permuted():
    p = PlanBuilder("permuted_outside_of_pools")
    p.output("w", p.emit("permute_rows", p.weight("q", 19, 3), **HEADS))
    return evaluate(p.build(), q=torch.randn(19, 3))


TABLE, POSITIONS = codetta.rotary_table(14, 4), torch.arange(14)


#: Everything that keeps a tensor, each called so that it makes one.
KEEPERS = {
    "ones": lambda: arrays.ones(4097, CPU),
    "turning": lambda: arrays.turning(26, 13, 4, -1, CPU),
    "rotary": lambda: rotary.rotary(TABLE, POSITIONS, 6, 24),
    "number": lambda: checked.number(0.8112963, torch.float32, CPU),
    "source rows": permuted,
    "tables": lambda: triton_prepare._found(*packed()),
}


@pytest.fixture(autouse=True)
def cold(monkeypatch):
    checked._number.cache_clear()
    triton_prepare._packing.cache_clear()
    monkeypatch.setattr(triton_prepare, "_BOUND", {})
    monkeypatch.setattr(rotary, "_TURNS", type(rotary._TURNS)())


@pytest.mark.parametrize("name", KEEPERS)
def test_what_is_kept_is_made_on_another_thread_and_once(name):
    with like_a_gpu() as outside:
        KEEPERS[name]()
        made = len(outside.made)
        assert made == outside.entered >= 1
        KEEPERS[name]()
        assert len(outside.made) == made
    for x in outside.made:
        assert not x.is_inference() and not x.requires_grad


@pytest.mark.parametrize("name", ["ones", "turning", "source rows", "tables"])
def test_what_any_stream_may_read_is_waited_for(name):
    with like_a_gpu() as outside:
        KEEPERS[name]()
        assert outside.stream.synchronized == len(outside.made)


def test_in_inference_mode_it_is_no_inference_tensor():
    with torch.inference_mode():
        for place in (CPU, torch.device("meta")):
            made = kept.outside_pools(place, lambda place=place: torch.ones(2, device=place))
            assert not made.is_inference()


def test_errors_arrive_and_nothing_is_kept():
    def fails():
        raise ZeroDivisionError

    with like_a_gpu():
        with pytest.raises(ZeroDivisionError):
            kept.kept(CPU, ("x",), fails)
        assert kept.kept(CPU, ("x",), lambda: torch.ones(3)).sum() == 3


def test_a_cpu_takes_no_thread():
    made = []
    kept.outside_pools(CPU, lambda: made.append(current_thread()) or torch.ones(1))
    assert made == [main_thread()]


def test_nothing_is_kept_from_a_capture(monkeypatch):
    with like_a_gpu() as outside:
        monkeypatch.setattr(kept, "capturing", lambda: True)
        first = kept.kept(CPU, ("x",), lambda: torch.ones(3))
        assert kept.kept(CPU, ("x",), lambda: torch.ones(3)) is not first
        assert not outside.made
        monkeypatch.setattr(kept, "capturing", lambda: False)
        again = kept.kept(CPU, ("x",), lambda: torch.ones(3))
        monkeypatch.setattr(kept, "capturing", lambda: True)
        assert kept.kept(CPU, ("x",), lambda: torch.ones(3)) is again


def test_to_ask_from_within_is_refused_where_it_would_hang():
    with like_a_gpu() as outside, pytest.MonkeyPatch.context() as patch:  # undone before the first
        patch.setattr(kept, "_stream", lambda device: outside.stream)
        with pytest.raises(AssertionError, match="wait for itself"):
            kept.kept(CPU, ("x",), lambda: arrays.ones(5, CPU))


def test_maps_of_rows_stay_on_the_host_whatever_the_default_device_is():
    """Inductor makes the GPU the default device around the first run of its graphs."""
    plan, _ = packed()
    with torch.device("meta"):
        packing = triton_prepare._packing(plan.text)
    assert {rows.device for _, rows in packing.maps} == {CPU}
    assert layouts.permutation(HEADS, 18)[1] == 2


@pytest.mark.cuda
def test_a_pool_of_this_thread_takes_what_is_made_on_it_alone(gpu):
    device = torch.device("cuda", torch.cuda.current_device())
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        made = [
            kept.outside_pools(device, lambda: torch.ones(999, device=device)),
            torch.ones(999, device=device),
        ]
    memory = [(s["address"], s["address"] + s["total_size"]) for s in pool.snapshot()]
    inside = [any(start <= x.data_ptr() < stop for start, stop in memory) for x in made]
    assert inside == [False, True]


# ---------------------------------------------------------------- as the check of the pools does
@pytest.mark.parametrize("name", [n for n in KEEPERS if n != "tables"])
def test_keepers_leave_nothing_else_alive(name):
    assert not left_by(KEEPERS[name])


def test_the_check_finds_what_is_kept_otherwise():
    mine = []
    assert len(left_by(lambda: mine.append(torch.ones(7)))) == 1


@codetta.epilogue
def scaled(acc, s: Scalar):  # type: ignore[no-untyped-def, valid-type]
    return acc * s


ROTATED = programs.row_scale_rotary(6, 4, heads=3)


def test_calls_leave_nothing_else_alive():
    g = torch.Generator().manual_seed(0)
    a, w = (torch.randn(n, 24, generator=g).bfloat16() for n in (14, 36))

    def run():
        x, y = (t.clone().requires_grad_() for t in (a, w))
        with running("emulated"):
            for _ in range(3):  # from the second on calls are bound
                codetta.gemm(x, y.t(), scaled, s=0.7312).sum().backward()
                codetta.gemm(x, y.t(), ROTATED, r=torch.ones(14), rope=(TABLE, POSITIONS))
                codetta.linear_cross_entropy(x, y, torch.arange(14)).backward()

    assert not left_by(run)
