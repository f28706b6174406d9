"""Schedules bound to a class of inputs: the same bits, in the same memory, for that class alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.fused import running
from helpers.spy import Spy
from plan_backends import Binding
from plan_oracle import for_run, random_inputs
from plan_samples import decoder_layer, fused
from torch import Tensor

import codetta
from codetta.backends.cuda import capture
from codetta.language import round_to, silu
from codetta.language.types import Kind
from codetta.plan import PlanBuilder, Schedule, peak_bytes, schedule
from codetta.plan.bound import Bindings
from codetta.plan.rules.products import mm

PARTS = fused(decoder_layer(16, 64, 2, 2, 8))
HALVES = {"forward": schedule(PARTS.forward), "backward": schedule(PARTS.backward, PARTS.private)}
M = 37


def inputs_of(found: Schedule, m: int = M, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    plan = found.plan
    narrow = {i.name: i.type.kind is Kind.TILE or i.role == "parameter" for i in plan.inputs}
    values = {
        n: x.to(dtype if narrow.get(n, x.ndim == 2) else torch.float32)
        for n, x in random_inputs(plan, m).items()
    }
    made = for_run(values, plan)
    return [made[n] for n in found.executable.names]


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Binding:
    backend = Binding()
    monkeypatch.setattr("codetta.plan.executable.backend_for", lambda x: backend)
    return backend


@pytest.fixture(params=HALVES)
def half(request: pytest.FixtureRequest) -> Schedule:
    """A schedule that nothing was bound for."""
    found = HALVES[request.param]
    found.executable.__init__(found)  # type: ignore[misc]
    return found


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """'bound' for each run by a function, 'steps' for the others."""
    seen: list[str] = []
    original = Bindings.find

    def find(self: Bindings, key: Any) -> Any:
        function = original(self, key)
        seen.append("steps" if function is None else "bound")
        return function

    monkeypatch.setattr(Bindings, "find", find)
    return seen


def run(found: Schedule, values: list[Any], **options: Any) -> list[Tensor]:
    return found.executable.run(list(values), **options)


def equal(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(
        torch.equal(x, y) and x.dtype is y.dtype and x.stride() == y.stride()
        for x, y in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("m", [1, 37, 129])
def test_a_bound_run_of_the_fused_backend_gives_the_same_bits(
    half: Schedule, m: int, called: list[str]
) -> None:
    with running("emulated"):
        for seed in range(4):
            torch.manual_seed(seed)
            values = inputs_of(half, m)
            before = [x.clone() for x in values if isinstance(x, Tensor)]
            found = run(half, values)
            with Spy() as spy:  # by operators, step by step
                expected = run(half, values)
            assert spy.names
            assert equal(found, expected)
            assert equal([x for x in values if isinstance(x, Tensor)], before)
    assert called == ["steps", "steps", "bound", "bound"]


def test_results_of_bound_runs_are_fresh(half: Schedule) -> None:
    with running("emulated"):
        values = inputs_of(half)
        runs = [run(half, values) for _ in range(4)]
    places = [{x.untyped_storage().data_ptr() for x in made} for made in runs]
    assert not places[2] & places[3]


def another_stride(x: Tensor) -> Tensor:
    return torch.cat((x, x), 1)[:, : x.shape[1]]


def another_address(x: Tensor) -> Tensor:
    return torch.cat((x.reshape(-1)[:1], x.reshape(-1)))[1:].view_as(x)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "stride": another_stride,
    "alignment": another_address,
    "dtype": lambda x: x.float(),
}


@pytest.mark.parametrize("change", OTHERS)
def test_inputs_of_another_class_are_not_run_by_the_same_function(
    half: Schedule, change: str, called: list[str]
) -> None:
    with running("emulated"):
        values = inputs_of(half)
        for _ in range(3):
            run(half, values)
        for k, x in enumerate(values):
            if not isinstance(x, Tensor) or x.ndim < 2:
                continue
            other = [*values[:k], OTHERS[change](x), *values[k + 1 :]]
            called.clear()
            found = run(half, other)
            with Spy():
                assert equal(found, run(half, other))
            assert called == ["steps"]
        assert run(half, values) and called[-1] == "bound"


def test_a_class_that_comes_once_is_not_bound(half: Schedule, binding: Binding) -> None:
    for m in (3, 4, 5):
        run(half, inputs_of(half, m))
    assert binding.bound == 0
    run(half, inputs_of(half, 4))
    assert binding.bound > 0


def test_nothing_is_bound_during_a_capture_and_what_was_is_called(
    half: Schedule, binding: Binding, called: list[str]
) -> None:
    values = inputs_of(half)
    binding.free = False
    for _ in range(3):
        run(half, values)
    assert binding.bound == 0
    binding.free = True
    run(half, values)
    binding.free = False
    run(half, values)
    assert called == ["steps"] * 4 + ["bound"]


def test_the_fused_backend_binds_nothing_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    from codetta.backends.cuda.launch import CUDA

    assert CUDA.can_bind()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert capture.capturing() and not CUDA.can_bind()


def test_another_setting_is_another_function(
    half: Schedule, binding: Binding, called: list[str]
) -> None:
    values = inputs_of(half)
    for _ in range(3):
        run(half, values)
    binding.state = 1
    run(half, values)
    assert called == ["steps", "steps", "bound", "steps"]


def test_settings_of_the_fused_backend_are_told_apart() -> None:
    from codetta.backends.cuda.launch import CudaBackend

    backend = CudaBackend()
    before = backend.setting()
    with codetta.fp8_accumulation("full"):
        assert backend.setting() != before
    with codetta.use_configuration(codetta.Configuration(128, 128, pingpong=True)):
        assert backend.setting() != before
    assert backend.setting() == before != CudaBackend().setting()
    backend.forget()
    assert backend.setting() != before


@pytest.mark.parametrize("watcher", [Spy, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_whoever_watches_sees_every_kernel_of_a_bound_schedule(
    half: Schedule, binding: Binding, watcher: Any
) -> None:
    values = inputs_of(half)
    expected = [run(half, values) for _ in range(3)][-1]
    calls = binding.calls
    with watcher():
        assert equal(run(half, values), expected)
    assert binding.calls == calls


@pytest.mark.parametrize("accepts", [False, True])
def test_a_bound_run_frees_what_it_has_read(
    half: Schedule, binding: Binding, accepts: bool
) -> None:
    """Inputs that only the run holds, too; the peak is that of a run by steps."""
    binding.accepts = accepts
    peaks = []
    for _ in range(3):
        names = half.executable.names
        values = [
            binding.own(x) if n in half.private else x
            for n, x in zip(names, inputs_of(half), strict=True)
        ]
        binding.peak = 0
        half.executable.run(values)
        assert not values and binding.live == 0
        peaks.append(binding.peak)
    assert len(set(peaks)) == 1
    if not accepts:
        assert peaks[0] == peak_bytes(half, tokens=M, donate=False)


def test_a_run_that_may_write_to_inputs_asks_anew_each_time(binding: Binding) -> None:
    found = HALVES["backward"]
    found.executable.__init__(found)  # type: ignore[misc]
    assert found.executable.donates
    for _ in range(3):
        run(found, inputs_of(found), donate=True)
    assert binding.bound == 0


def packed() -> Schedule:
    p = PlanBuilder("packed")
    x, a, b = p.tile("x", "M", 16), p.weight("a", 8, 16), p.weight("b", 8, 16)
    p.output("z", silu(mm(p, "nt", x, p.emit("stack_rows", a, b))))
    return schedule(p.build())


def test_weights_that_come_to_lie_side_by_side_are_another_class(
    binding: Binding, called: list[str]
) -> None:
    found, x = packed(), torch.randn(5, 16)
    whole = torch.randn(16, 16)
    together, apart = [whole[:8], whole[8:]], [whole[:8].clone(), whole[8:].clone()]
    kernels = []
    for weights in (apart, apart, apart, together, together, together, apart):
        before = binding.calls
        (z,) = run(found, [x, *weights])
        kernels.append(binding.calls - before)
        torch.testing.assert_close(z, torch.nn.functional.silu(x @ whole.T))
    assert called == ["steps", "steps", "bound"] * 2 + ["bound"]
    assert kernels[3:6] == [kernels[0] - 1] * 3 and kernels[6] == kernels[0]


def test_what_packs_values_that_are_no_inputs_is_not_bound(binding: Binding) -> None:
    """Whether those lie side by side is not known beforehand."""
    p = PlanBuilder("scaled")
    x, a, b = p.tile("x", "M", 16), p.weight("a", 8, 16), p.weight("b", 8, 16)
    scaled = round_to(a * p.row("g", 16))
    p.output("y", mm(p, "nt", x, scaled))
    p.output("z", mm(p, "nt", x, p.emit("stack_rows", scaled, b)))
    found = schedule(p.build())
    assert sum(k.kind == "prepare" for k in found.kernels) == 2
    given = [torch.randn(5, 16), torch.randn(8, 16), torch.randn(8, 16), torch.randn(16)]
    expected = given[0] @ torch.cat((given[1] * given[3], given[2])).T
    for _ in range(3):
        made = run(found, given)
        torch.testing.assert_close(made, [expected[:, :8], expected])
    assert found.executable.bindings is None and binding.bound == 0
