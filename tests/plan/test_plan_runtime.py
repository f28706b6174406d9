"""Running Schedules: directly where nobody watches, through operators where somebody does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from helpers.spy import Spy
from plan_backends import Watching
from plan_oracle import Tensors, for_run, random_inputs
from plan_samples import decoder_layer, fused
from torch._subclasses.fake_tensor import FakeTensorMode

from codetta.errors import PlanInput
from codetta.language.types import Kind
from codetta.plan import Plan, PlanBuilder, Schedule, run, schedule
from codetta.plan.launch import OPERATORS
from codetta.plan.prepare import PREPARE, prepared

PARTS = fused(decoder_layer())
M = 37
HALVES = {"forward": schedule(PARTS.forward), "backward": schedule(PARTS.backward, PARTS.private)}


def inputs_of(found: Schedule, m: int = M, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    plan = found.plan
    narrow = {i.name: i.type.kind is Kind.TILE or i.role == "parameter" for i in plan.inputs}
    wide = torch.promote_types(dtype, torch.float32)
    values: Tensors = random_inputs(plan, m)
    return for_run({n: x.to(dtype if narrow[n] else wide) for n, x in values.items()}, plan)


def count(found: Schedule) -> int:
    return sum(k.kind not in ("view", "move", "opaque") for k in found.kernels)


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels launched through the library operators."""
    seen: list[str] = []
    for name in ("gemm", "pointwise", "prepare"):
        original: Callable[..., Any] = getattr(type(OPERATORS), name)

        def noted(self: Any, *args: Any, _o: Any = original, _n: str = name, **options: Any) -> Any:
            seen.append(_n)
            return _o(self, *args, **options)

        monkeypatch.setattr(type(OPERATORS), name, noted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", HALVES)
def test_both_ways_give_the_same_bits(half: str, dtype: torch.dtype, operators: list[str]) -> None:
    found = HALVES[half]
    inputs = inputs_of(found, dtype=dtype)
    direct = run(found, inputs)
    assert not operators
    with Spy() as spy:
        watched = run(found, inputs)
    assert len(operators) == len(spy.names) == count(found)
    for name, x in direct.items():
        assert x.dtype is watched[name].dtype and torch.equal(x, watched[name]), name


def test_a_default_device_watches_nothing(operators: list[str]) -> None:
    found, inputs = HALVES["forward"], inputs_of(HALVES["forward"])
    with torch.device("cpu"):
        run(found, inputs)
    assert not operators


class Own(torch.Tensor):
    """A tensor class that sees what is done with it."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs)


WATCHERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a dispatch mode": Spy,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_whoever_watches_sees_every_kernel(watcher: str, operators: list[str]) -> None:
    found, inputs = HALVES["forward"], inputs_of(HALVES["forward"])
    expected = run(found, inputs)
    with WATCHERS[watcher]():
        seen = run(found, inputs)
    assert len(operators) == count(found)
    assert all(torch.equal(x, seen[n]) for n, x in expected.items())


@pytest.mark.parametrize("name", ["wo", "x0", "g1"])
def test_a_tensor_of_another_class_sees_the_kernels_that_read_it(
    name: str, operators: list[str]
) -> None:
    found, inputs = HALVES["forward"], inputs_of(HALVES["forward"])
    Own.seen.clear()
    run(found, inputs | {name: inputs[name].as_subclass(Own)})
    assert len(operators) == count(found)
    assert any(x.startswith("codetta.") for x in Own.seen)


def test_fake_tensors_run_without_memory() -> None:
    found, inputs = HALVES["forward"], inputs_of(HALVES["forward"])
    expected = run(found, inputs)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = {
            n: tuple(map(mode.from_tensor, x)) if isinstance(x, tuple) else mode.from_tensor(x)
            for n, x in inputs.items()
        }
        shapes = run(found, fakes)
    assert {n: (x.shape, x.dtype) for n, x in shapes.items()} == {
        n: (x.shape, x.dtype) for n, x in expected.items()
    }


@pytest.mark.parametrize("watched", [False, True])
def test_no_graph_is_recorded(watched: bool) -> None:
    found, inputs = HALVES["forward"], inputs_of(HALVES["forward"])
    for x in inputs.values():
        if isinstance(x, torch.Tensor):
            x.requires_grad_()
    with Spy() if watched else nullcontext():
        made = run(found, inputs)
    assert not any(x.requires_grad for x in made.values())


def test_a_wrong_name_is_refused() -> None:
    found, inputs = HALVES["forward"], inputs_of(HALVES["forward"])
    with pytest.raises(PlanInput, match="wo"):
        run(found, {n: x for n, x in inputs.items() if n != "wo"})


def test_the_callers_inputs_stay_what_they_were() -> None:
    """Also for a schedule with private inputs: only apply_plan gives them away."""
    for found in HALVES.values():
        inputs = inputs_of(found)
        before = {n: x.clone() for n, x in inputs.items() if isinstance(x, torch.Tensor)}
        run(found, inputs)
        assert all(torch.equal(inputs[n], x) for n, x in before.items())


# ---------------------------------------------------------------------------------- donation
Z = (M, 24)  # gate and up before the activation, the one private input that a result fits


def given_away(found: Schedule, backend: Watching, *, donate: bool = True) -> Any:
    """Outputs by name; private inputs are referred to by the run alone."""
    values = inputs_of(found)
    list_ = [
        backend.own(values[n]) if n in found.private else values[n] for n in found.executable.names
    ]
    del values
    return dict(zip(found.executable.outputs, found.executable.run(list_, donate=donate)))  # noqa: B905


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Watching:
    backend = Watching()
    monkeypatch.setattr("codetta.plan.executable.backend_for", lambda x: backend)
    return backend


def test_results_in_donated_memory_have_the_same_bits(watching: Watching) -> None:
    found = HALVES["backward"]
    expected = run(found, inputs_of(found))
    assert Z not in watching.taken
    made = given_away(found, watching)
    assert Z in watching.taken
    assert all(torch.equal(x, made[n]) for n, x in expected.items())


def test_nothing_is_donated_unasked(watching: Watching) -> None:
    given_away(HALVES["backward"], watching, donate=False)
    assert Z not in watching.taken


@pytest.mark.parametrize("hold", [lambda x: x, lambda x: x[:1], lambda x: x.detach()])
def test_memory_that_somebody_else_refers_to_is_not_written(
    hold: Callable[[torch.Tensor], torch.Tensor], watching: Watching
) -> None:
    found = HALVES["backward"]
    values = inputs_of(found)
    mine = {n: watching.own(values[n]) for n in found.private}
    held = {n: hold(x) for n, x in mine.items()}
    before = {n: x.clone() for n, x in held.items()}
    list_ = [mine.pop(n) if n in found.private else values[n] for n in found.executable.names]
    found.executable.run(list_, donate=True)
    assert Z not in watching.taken
    assert all(torch.equal(held[n], x) for n, x in before.items())


# ------------------------------------------------------------------------ weight preparation
def weights() -> tuple[Plan, list[torch.Tensor]]:
    p = PlanBuilder("packed")
    both = p.emit("stack_rows", p.weight("a", 3, 8), p.weight("b", 5, 8))
    p.output("w", both * p.row("g", 8))
    g = torch.Generator().manual_seed(0)
    shapes = [(3, 8), (5, 8), (8,)]
    return p.build(), [torch.randn(s, generator=g).to(torch.bfloat16) for s in shapes]


def test_the_operator_is_the_definition() -> None:
    plan, given = weights()
    found = PREPARE(plan.text, given)
    exact = torch.cat(given[:2]).float() * given[2].float()
    assert torch.equal(found, exact.to(torch.bfloat16))
    assert torch.equal(prepared(plan, given), found)


def test_a_prepared_weight_never_shares_memory_with_a_parameter() -> None:
    p = PlanBuilder("part")
    p.output("w", p.emit("slice_rows", p.weight("a", 4, 8), start=1, stop=3))
    a = torch.randn(4, 8)
    for found in (prepared(p.build(), [a]), PREPARE(p.build().text, [a])):
        assert torch.equal(found, a[1:3])
        found.zero_()
        assert bool(a.all())


def test_the_operator_passes_torchs_own_checks() -> None:
    plan, given = weights()
    torch.library.opcheck(PREPARE, (plan.text, given))
