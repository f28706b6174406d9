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
from codetta.loss.plan import MEMORY_LIMIT, candidates

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


@pytest.mark.parametrize("schedule", ["forward", "recompute"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_the_memory_of_a_run_is_that_of_its_plan(schedule, dtype, monkeypatch):
    """Beside gradients and vectors, which are small here."""
    m, d, v = 512, 16, 640
    wanted = problem(m=m, d=d, v=v, dtype=dtype, shifted=True)
    plan = choose(wanted, schedule=schedule, limit=1 << 18)
    monkeypatch.setattr("codetta.loss.operator.choose", lambda *a, **k: plan)
    x, weight, target, _ = head(m, d=d, v=v, dtype=dtype)
    gc.collect()
    with codetta.use_backend("reference"), Alive() as alive:
        loss = codetta.linear_cross_entropy(x, weight, target)
        torch.autograd.grad(loss, (x, weight))
    gradients = (m + v) * d * dtype.itemsize
    vectors = 16 * m * 4
    assert plan.bytes_extra <= alive.peak <= plan.bytes_extra + gradients + vectors
