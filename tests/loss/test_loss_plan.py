"""Which schedule is chosen, and that its memory is what the plan says."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from loss_oracle import head
from torch.utils._python_dispatch import TorchDispatchMode

import codetta
from codetta.backends.calls import ReferenceBackend
from codetta.backends.cuda.arrays import is_matrix
from codetta.loss import Problem, choose
from codetta.loss.plan import MEMORY_LIMIT, PRECISION_COST, PROCESSORS, _busy, _gemm, candidates

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
            fastest = min(p.seconds for p in fitting)
            assert plan.seconds <= PRECISION_COST * fastest
            assert plan.seconds == fastest or plan.sum_bits == 32
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
    text = str(choose(problem(shifted=True)))
    assert text.startswith("forward: chunks of 2048 tokens;") and "MiB extra" in text
    assert "of the vocabulary" in str(choose(problem(d=4096, scalar=False)))


def test_a_wave_of_tiles_that_is_not_full_costs_time():
    """416 tiles of 128 x 256 take as long as 528."""
    assert _busy(128 * PROCESSORS, 256) == 1.0
    assert _busy(3328, 4096) < 0.88 < 0.96 < _busy(3072, 4096)
    assert _busy(0, 5) == 1.0


# ---------------------------------------------------------------------------- sums in 24 bits
def short(**changes):
    return problem(**{"shifted": True, **changes})


LARGE = [(4096, 128256, 24), (4096, 151936, 20), (2048, 151936, 24), (5120, 151936, 20)]


@pytest.mark.parametrize(("d", "v", "bits"), LARGE)
def test_three_products_fit_where_an_fp32_sum_does_not(d, v, bits):
    plan = choose(short(d=d, v=v))
    assert plan.schedule == "forward" and plan.sum_bits == bits
    assert plan.bytes_extra <= MEMORY_LIMIT
    wide = choose(short(d=d, v=v, wide_sums=True))
    assert (
        wide.schedule == "recompute" and wide.sum_bits == 32 and wide.seconds > 1.3 * plan.seconds
    )
    assert f"dW summed in {bits} bits" in str(plan) and "bits" not in str(wide)


def test_a_sum_in_20_bits_is_of_few_chunks():
    """So that its roundings cannot add up to more than the last one."""
    found = [p for p in candidates(short(m=4096)) if p.sum_bits == 20]
    assert {-(-4096 // p.rows) for p in found} == {2, 3, 4, 5, 6, 7, 8}
    for m, most in ((9 * 128, 9), (10 * 128, 5)):  # of 128 tokens, or of 256
        assert max(-(-m // p.rows) for p in candidates(short(m=m)) if p.sum_bits == 20) == most


def test_adding_to_a_sum_takes_time_that_few_tokens_do_not_hide():
    """Against benchmarks/results/2026-12-03-h200-4/sustained_sum24.json."""
    for rows, least, most in ((1024, 1.2, 1.3), (2048, 1.0, 1.07), (8192, 1.0, 1.02)):
        plain, added = (_gemm(151936, 4096, rows, 2, written) for written in (2, 6))
        assert least < added / plain < most


def fitting(wanted, limit):
    """The fastest plan with a sum in 24 bits that fits, and the fastest with one in fp32."""
    found = [p for p in candidates(wanted) if p.bytes_extra <= limit]
    return [min((p for p in found if p.sum_bits == e), key=lambda p: p.seconds) for e in (24, 32)]


def test_an_fp32_sum_that_fits_goes_first():
    small = short(v=128256)
    narrow, wide = fitting(small, 1 << 30)
    assert narrow.seconds < wide.seconds <= PRECISION_COST * narrow.seconds
    for limit in (1 << 30, 1 << 32):
        assert choose(small, limit=limit).sum_bits == 32
        assert choose(small, limit=limit) == choose(short(v=128256, wide_sums=True), limit=limit)


def test_a_sum_of_more_bits_that_costs_much_time_does_not():
    """Few tokens in a chunk: adding takes longer than the product."""
    for bits, fewer in ((32, 24), (24, 20)):
        wanted = short(d=4096, v=151936, wide_sums=False)
        more, less = (
            min((p for p in candidates(wanted) if p.sum_bits == b and p.bytes_extra <= 1 << 30),
                key=lambda p: p.seconds)
            for b in (bits, fewer)
        )  # fmt: skip
        assert more.seconds > PRECISION_COST * less.seconds
    assert choose(wanted) == less
    assert choose(replace(wanted, wide_sums=True)) == min(
        (p for p in candidates(replace(wanted, wide_sums=True)) if p.bytes_extra <= 1 << 30),
        key=lambda p: p.seconds,
    )


@pytest.mark.parametrize(
    "other",
    [{"dtype": torch.float16}, {"dtype": torch.float32}, {"dtype": torch.float64},
     {"scalar": False}, {"dw": False}, {"wide_sums": True}, {"m": 128}],
    ids=lambda o: "-".join(o) + str(*o.values()),
)  # fmt: skip
def test_nothing_else_is_summed_in_fewer_bits(other):
    """Other dtypes, losses that recompute, a frozen weight, one chunk, what is told not to."""
    assert {p.sum_bits for p in candidates(short())} == {20, 24, 32}
    assert {p.sum_bits for p in candidates(short(**other))} == {32}


class Alive(TorchDispatchMode):
    """Most bytes of what codetta's operators made or wrote that were alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[weakref.ref, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "codetta":
            written = args[:2] if func is torch.ops.codetta.gemm_short_sum_.default else ()
            for x in [out] if isinstance(out, torch.Tensor) else out or written:
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


@pytest.mark.parametrize("bits", [24, 20])
def test_a_short_sum_takes_a_byte_or_half_of_one_per_element_beside_the_gradient(bits, monkeypatch):
    m, d, v = 512, 64, 2560
    wanted = short(m=m, d=d, v=v)
    plan = next(p for p in candidates(wanted) if p.sum_bits == bits and p.rows == 128)
    assert plan.bytes_extra == v * d * (bits - 16) // 8 + 128 * (v + d) * 2
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


@pytest.mark.parametrize(("rows", "bits"), [(16, 20), (4, 24)])
@pytest.mark.parametrize("d", [16, 24, 40])
def test_the_bytes_of_a_sum_lie_where_kernels_can_write_them(d, rows, bits, monkeypatch):
    """TMA wants rows of whole 16 bytes, also where D is no multiple of 16."""
    seen = []
    made = ReferenceBackend.gemm_short_sum_

    def noted(self, high, low, *rest):
        seen.append((is_matrix(high, either=False), is_matrix(low, either=False), low.shape))
        made(self, high, low, *rest)

    monkeypatch.setattr(ReferenceBackend, "gemm_short_sum_", noted)
    x, weight, target, _ = head(48, d=d, v=40, dtype=BF16)
    options = {"schedule": "forward", "chunk": rows, "memory_limit": 1}
    with codetta.use_backend("reference"):
        loss = codetta.linear_cross_entropy(x, weight, target, **options)
        torch.autograd.grad(loss, weight)
    assert seen == [(True, True, (40, d if bits == 24 else 16 * -(-d // 32)))] * (48 // rows)
