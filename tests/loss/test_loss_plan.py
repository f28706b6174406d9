"""Which schedule is chosen, and that its memory is what the plan says."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from loss_oracle import head
from torch.utils._python_dispatch import TorchDispatchMode

import codetta
from codetta.loss import Problem, choose
from codetta.loss.plan import MEMORY_LIMIT, PRECISION_COST, ROUNDED_CHUNKS, candidates

BF16 = torch.bfloat16


def problem(m=16384, d=2048, v=128256, dtype=BF16, scalar=True, **need):
    return Problem(m, d, v, dtype, scalar, **{"dx": True, "dw": True, **need})


@pytest.mark.parametrize("d", [2048, 4096])
@pytest.mark.parametrize("v", [7, 32000, 50257, 49152, 128256, 151936])
@pytest.mark.parametrize("scalar", [True, False])
def test_the_choice_stays_within_its_memory(d, v, scalar):
    plan = choose(problem(d=d, v=v, scalar=scalar))
    assert plan.bytes_extra <= MEMORY_LIMIT
    assert scalar or plan.schedule == "recompute"


def test_the_fastest_that_fits_is_chosen():
    for d in (2048, 4096):
        for limit in (1 << 29, 1 << 30, 1 << 32):
            plan = choose(problem(d=d), limit=limit)
            fitting = [p for p in candidates(problem(d=d)) if p.bytes_extra <= limit]
            assert plan.seconds == min(p.seconds for p in fitting)
    assert choose(problem()).schedule == "forward"


def test_what_fits_nowhere_gets_the_smallest():
    found = list(candidates(problem()))
    assert choose(problem(), limit=0).bytes_extra == min(p.bytes_extra for p in found)


def test_a_loss_scale_that_is_still_to_come_forbids_forming_fp16_gradients():
    assert choose(problem(dtype=torch.float16)).schedule == "recompute"
    assert choose(problem(dtype=torch.float16), schedule="forward").schedule == "forward"


def test_a_chunk_is_what_was_asked_for():
    for schedule in ("forward", "recompute"):
        plan = choose(problem(), schedule=schedule, chunk=1000)
        assert (plan.schedule, plan.rows, plan.chunk, plan.over) == (
            schedule, 1000, 1000, "tokens",
        )  # fmt: skip
    assert choose(problem(m=10), chunk=1000).rows == 10


def test_a_plan_prints_what_it_costs():
    text = str(choose(problem()))
    assert text.startswith("forward: chunks of 1024 tokens;") and "MiB extra" in text
    assert "of the vocabulary" in str(choose(problem(scalar=False)))


# ------------------------------------------------------------------------------ sums in bf16
def rounding(**changes):
    return problem(**{"shifted": True, "may_round": True, **changes})


LARGE = [(4096, 128256), (4096, 151936), (2048, 151936)]


@pytest.mark.parametrize(("d", "v"), LARGE)
def test_three_products_fit_where_an_fp32_sum_does_not_if_it_may_be_rounded(d, v):
    plan = choose(rounding(d=d, v=v))
    assert plan.schedule == "forward" and plan.rounded and plan.bytes_extra <= MEMORY_LIMIT
    assert -(-16384 // plan.rows) <= ROUNDED_CHUNKS == 5
    wide = choose(rounding(d=d, v=v, may_round=False))
    assert wide.schedule == "recompute" and not wide.rounded and wide.seconds > 1.3 * plan.seconds
    assert "dW summed in bf16" in str(plan) and "bf16" not in str(wide)


def fitting(wanted, limit):
    """The fastest plan with rounded sums that fits, and the fastest without."""
    found = [p for p in candidates(wanted) if p.bytes_extra <= limit]
    return [
        min((p for p in found if p.rounded is r), key=lambda p: p.seconds) for r in (True, False)
    ]


def test_an_fp32_sum_that_fits_goes_first():
    small = rounding(m=6000, d=2048, v=32000)
    rounded, wide = fitting(small, 1 << 28)
    assert rounded.seconds < wide.seconds <= PRECISION_COST * rounded.seconds
    assert choose(small, limit=1 << 28) == wide
    for limit in (1 << 30, 1 << 32):
        assert not choose(rounding(v=128256), limit=limit).rounded
        assert choose(rounding(v=128256), limit=limit) == choose(
            rounding(v=128256, may_round=False), limit=limit
        )


def test_an_fp32_sum_that_costs_much_time_does_not():
    """Few tokens: adding in fp32 moves more bytes than the products compute."""
    few, limit = rounding(m=1024, d=256), 200 << 20
    rounded, wide = fitting(few, limit)
    assert wide.seconds > PRECISION_COST * rounded.seconds
    assert choose(few, limit=limit) == rounded


@pytest.mark.parametrize("m", [1, 128, 130, 1000, 16384, 1 << 20])
def test_no_more_than_five_chunks_are_summed_in_bf16(m):
    found = {-(-m // p.rows) for p in candidates(rounding(m=m)) if p.rounded}
    assert found <= {2, 3, 4, 5} and (5 in found or m <= 1000)  # parts are whole tiles
    for chunks in range(1, 9):
        rows = max(1, -(-m // chunks))
        some = any(p.rounded for p in candidates(rounding(m=m), rows))
        assert some == (1 < -(-m // rows) <= 5)


@pytest.mark.parametrize(
    "other",
    [{"shifted": False}, {"dtype": torch.float16}, {"dtype": torch.float32}, {"scalar": False},
     {"dw": False}, {"may_round": False}],
    ids=lambda o: "-".join(o) + str(*o.values()),
)  # fmt: skip
def test_nothing_else_is_summed_in_bf16(other):
    assert any(p.rounded for p in candidates(rounding()))
    assert not any(p.rounded for p in candidates(rounding(**other)))


class Alive(TorchDispatchMode):
    """Most bytes of the results of codetta's operators that were alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[weakref.ref, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "codetta":
            for x in [out] if isinstance(out, torch.Tensor) else out or ():
                memory = x.untyped_storage()
                self.known[memory._cdata] = (weakref.ref(memory), memory.nbytes())
            alive = sum(size for ref, size in self.known.values() if ref() is not None)
            self.peak = max(self.peak, alive)
        return out


def takes(plan, wanted, monkeypatch):
    """Whether a run takes what its plan says, beside its gradients and vectors, which are small."""
    m, d, v, dtype = wanted.m, wanted.d, wanted.v, wanted.dtype
    monkeypatch.setattr("codetta.loss.operator.choose", lambda *a, **k: plan)
    x, weight, target, _ = head(m, d=d, v=v, dtype=dtype)
    x.requires_grad_(wanted.dx)
    gc.collect()
    with codetta.use_backend("reference"), Alive() as alive:
        loss = codetta.linear_cross_entropy(x, weight, target)
        torch.autograd.grad(loss, (x, weight) if wanted.dx else (weight,))
    beside = (m * wanted.dx + v) * d * dtype.itemsize + vectors(wanted)
    return plan.bytes_extra <= alive.peak <= plan.bytes_extra + beside


def vectors(wanted):
    return 16 * wanted.m * 4


@pytest.mark.parametrize("schedule", ["forward", "recompute"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_the_memory_of_a_run_is_that_of_its_plan(schedule, dtype, monkeypatch):
    wanted = problem(m=512, d=16, v=640, dtype=dtype, shifted=True)
    assert takes(choose(wanted, schedule=schedule, limit=1 << 18), wanted, monkeypatch)


def test_a_sum_in_bf16_takes_no_memory_beside_the_gradient(monkeypatch):
    m, d, v = 512, 64, 2560
    wanted = rounding(m=m, d=d, v=v)
    plan = next(p for p in candidates(wanted) if p.rounded and p.rows == 128)
    # What an fp32 sum would take is more than dx and the chunk's rows, which may be out of sight.
    assert vectors(wanted) + (m + 128) * d * 2 < 2 * v * d
    assert takes(plan, wanted, monkeypatch)


@pytest.mark.parametrize("frozen", [False, True])
def test_one_chunk_takes_nothing_beside_its_exponentials(frozen, monkeypatch):
    """The weighted rows of x have gone when dx, a gradient, comes; without dx they stay."""
    m, d, v = 256, 128, 512
    wanted = problem(m=m, d=d, v=v, dx=not frozen, shifted=True)
    plan = next(p for p in candidates(wanted) if p.schedule == "forward" and p.rows == m)
    assert plan.bytes_extra == m * v * 2 + frozen * m * d * 2
    assert vectors(wanted) < m * d * 2  # so that these rows would be seen
    assert takes(plan, wanted, monkeypatch)
