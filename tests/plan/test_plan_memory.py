"""Memory of Schedules: the computed peak is the measured one, the order keeps it low."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from plan_backends import Watching
from plan_oracle import Tensors, error, for_run, random_inputs
from plan_samples import LAYER_NORM, decoder_layer, fused, layer_norm_link
from plan_strategies import TOKENS, examples, plans

from codetta.language import round_to
from codetta.language.types import Kind
from codetta.plan import Plan, PlanBuilder, Schedule, Split, evaluate, peak_bytes, run, schedule
from codetta.plan.grouping import PREPARE, VIEW
from codetta.plan.memory import Memory
from codetta.plan.order import ordered
from codetta.plan.plan import PlanValue
from codetta.plan.sizes import Sizes

LAYERS = {
    "layer": fused(decoder_layer()),
    "biases": fused(decoder_layer(bias=True)),
    "wide": fused(decoder_layer(16, 64, 2, 2, 8)),
    "LayerNorm": fused(layer_norm_link(), forward=LAYER_NORM),
    "frozen": fused(decoder_layer(), wrt=["o", "x0", "g1"]),
}


def typed(inputs: Tensors, plan: Plan) -> Tensors:
    """bf16, but for vectors over tokens and rotary tables."""
    narrow = {i.name: i.type.kind is Kind.TILE or i.role == "parameter" for i in plan.inputs}
    return {
        n: x.to(torch.bfloat16 if narrow.get(n, x.ndim == 2) else torch.float32)
        for n, x in inputs.items()
    }


def measured(
    found: Schedule, inputs: Tensors, monkeypatch: pytest.MonkeyPatch, *, donate: bool
) -> Watching:
    """The schedule run on watched memory; private inputs lie there as well, referred to once."""
    backend = Watching(accepts=donate)
    monkeypatch.setattr("codetta.plan.executable.backend_for", lambda x: backend)
    values = for_run(typed(inputs, found.plan), found.plan)
    given_values = [
        backend.own(values[n]) if n in found.private else values[n] for n in found.executable.names
    ]
    del values
    made = found.executable.run(given_values, donate=True)
    assert len(made) == len(found.plan.outputs)
    return backend


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("m", [5, 300])
@pytest.mark.parametrize("name", LAYERS)
def test_the_computed_peak_is_the_measured_one(
    name: str, m: int, donate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = LAYERS[name]
    inputs = random_inputs(parts.forward, m)
    known = inputs | random_inputs(parts.backward, m)
    for found in (schedule(parts.forward), schedule(parts.backward, parts.private)):
        backend = measured(found, known, monkeypatch, donate=donate)
        assert backend.peak == peak_bytes(found, tokens=m, donate=donate)


def test_everything_but_the_outputs_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = LAYERS["layer"]
    found = schedule(parts.backward, parts.private)
    backend = measured(found, random_inputs(parts.backward, 7), monkeypatch, donate=False)
    assert backend.peak > 0 and backend.live == 0  # the outputs are gone as well by now


def test_a_gradient_takes_the_place_of_the_saved_preactivations() -> None:
    """dz over z: both (M, 2 F), the largest matrix of a layer."""
    parts = LAYERS["wide"]
    found = schedule(parts.backward, parts.private)
    saved = 2 * 4096 * 2 * 64
    with_donation, without = (peak_bytes(found, tokens=4096, donate=d) for d in (True, False))
    assert without - with_donation >= 0.9 * saved


def test_what_a_caller_can_see_is_never_offered() -> None:
    """Without private inputs, and of outputs, nothing; of the forward's own values, maybe."""
    for parts in LAYERS.values():
        for plan in (parts.forward, parts.backward):
            found = schedule(plan)
            outputs = {o.node for o in plan.outputs}
            inputs = {i for i, n in enumerate(plan.nodes) if n.op == "operand"}
            own = Memory(plan, found.kernels, found.private, sizes(found)).own
            assert not own & (outputs | inputs)


def donated(build: Callable[[PlanBuilder, PlanValue, PlanValue], None]) -> bool:
    """Whether the value h = x Vᵀ is overwritten in a Plan that ``build`` completes."""
    b = PlanBuilder("case")
    x = b.tile("x", "M", 8)
    h = b.mm(x, b.weight("v", 8, 8).t())
    build(b, x, h)
    found = schedule(b.build())
    inputs = random_inputs(found.plan, 5)
    exact = evaluate(found.plan, **inputs)
    backend = Watching()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("codetta.plan.executable.backend_for", lambda x: backend)
        made = run(found, for_run(inputs, found.plan))
    assert error(made, exact) <= 1e-12
    return bool(backend.taken)


def test_a_value_that_only_an_epilogue_reads_is_overwritten() -> None:
    def build(b: PlanBuilder, x: PlanValue, h: PlanValue) -> None:
        g = b.mm(round_to(h), b.weight("u", 4, 8).t())
        b.output("y", b.mm(g, b.weight("w", 8, 4).t()) + round_to(h))

    assert donated(build)


def test_a_value_that_the_mainloop_streams_is_not_overwritten() -> None:
    def build(b: PlanBuilder, x: PlanValue, h: PlanValue) -> None:
        b.output("y", b.mm(round_to(h), b.weight("w", 8, 8).t()) + round_to(h))

    assert not donated(build)


def test_a_value_that_an_output_shows_a_part_of_is_not_overwritten() -> None:
    def build(b: PlanBuilder, x: PlanValue, h: PlanValue) -> None:
        g = b.mm(round_to(h), b.weight("u", 4, 8).t())
        b.output("part", b.emit("slice_cols", round_to(h), start=2, stop=6))
        b.output("y", b.mm(g, b.weight("w", 8, 4).t()) + round_to(h))

    assert not donated(build)


def test_an_output_is_not_overwritten() -> None:
    def build(b: PlanBuilder, x: PlanValue, h: PlanValue) -> None:
        g = b.mm(round_to(h), b.weight("u", 4, 8).t())
        b.output("h", round_to(h))
        b.output("y", b.mm(g, b.weight("w", 8, 4).t()) + round_to(h))

    assert not donated(build)


def sizes(found: Schedule, tokens: int = 16384) -> Sizes:
    return Sizes(found.plan, found.kernels, tokens, torch.bfloat16)


# ------------------------------------------------------------------------------------ order
def best_peak(found: Schedule, tokens: int = 16384) -> int:
    """The smallest peak of all orders, by search over the sets of kernels that have run."""
    kernels = found.kernels
    writer = {w: i for i, k in enumerate(kernels) for w in k.writes}
    needs = [frozenset(writer[r] for r in k.reads if r in writer) for k in kernels]

    def alive(done: frozenset[int]) -> Memory:
        memory = Memory(found.plan, kernels, found.private, sizes(found, tokens))
        for i in sorted(done):  # the order within does not change what is left alive
            memory.run(i)
        return memory

    best = {frozenset[int](): 0}
    for _ in kernels:
        following: dict[frozenset[int], int] = {}
        for done, peak in best.items():
            memory = alive(done)
            for i in range(len(kernels)):
                if i not in done and needs[i] <= done:
                    during = memory.live + memory.change(i)[0]
                    key = done | {i}
                    new = max(peak, memory.live, during)
                    following[key] = min(new, following.get(key, new))
        best = following
    (peak,) = best.values()
    return peak


def without_views(parts: Split) -> Schedule:
    found = schedule(parts.backward, parts.private)
    kept = tuple(k for k in found.kernels if k.kind != VIEW)
    return Schedule(found.plan, kept, found.private)


@pytest.mark.parametrize("name", ["layer", "wide"])
def test_no_order_needs_noticeably_less_memory(name: str) -> None:
    found = without_views(LAYERS[name])
    assert peak_bytes(found, tokens=16384) <= 1.02 * best_peak(found)


def test_another_order_can_need_more() -> None:
    found = schedule(LAYERS["wide"].backward, LAYERS["wide"].private)
    late = tuple(sorted(found.kernels, key=_wgrads_last(found)))
    worse = Schedule(found.plan, late, found.private)
    assert peak_bytes(worse, tokens=16384) > 1.1 * peak_bytes(found, tokens=16384)


def _wgrads_last(found: Schedule) -> Callable[..., bool]:
    """Weight gradients, and all that only they lead to, behind everything else."""
    writer = {w: k for k in found.kernels for w in k.writes}
    late = {
        k.root
        for k in found.kernels
        if k.kind == "gemm" and found.plan.nodes[k.root].attr("layout") == "tn"
    }
    for k, r in itertools.product(found.kernels, range(len(found.kernels))):
        if r and any(writer[x].root in late for x in k.reads if x in writer):
            late.add(k.root)
    return lambda k: k.root in late


@pytest.mark.parametrize("name", LAYERS)
def test_weights_are_prepared_right_before_their_first_reader(name: str) -> None:
    parts = LAYERS[name]
    for found in (schedule(parts.forward), schedule(parts.backward, parts.private)):
        kernels = [k for k in found.kernels if k.kind != VIEW]
        for i, kernel in enumerate(kernels):
            if kernel.kind == PREPARE:
                after = next(k for k in kernels[i:] if k.kind != PREPARE)
                made = {w for k in kernels[i : kernels.index(after)] for w in k.writes}
                assert made & set(after.reads)


def test_a_layer_starts_with_a_product_that_waits_for_no_preparation() -> None:
    assert schedule(LAYERS["layer"].forward).kernels[0].kind == "gemm"


@examples(20)
@given(plan=plans(), m=TOKENS)
def test_random_plans_keep_no_value_beyond_its_last_reader(plan: Plan, m: int) -> None:
    """What is alive at the end, by the bookkeeping, are the outputs that are not inputs."""
    found = schedule(plan)
    memory = Memory(plan, found.kernels, (), sizes(found, max(m, 1)))
    for i in range(len(found.kernels)):
        memory.run(i)
    kept = {memory.root.get(o.node, o.node) for o in plan.outputs} & set(memory.bytes)
    assert memory.live == sum(memory.bytes[r] for r in kept)
    inputs = random_inputs(plan, m)
    assert set(run(found, for_run(inputs, plan))) == {o.name for o in plan.outputs}


def test_the_order_does_not_depend_on_the_order_of_the_kernels_given() -> None:
    parts = LAYERS["layer"]
    found = schedule(parts.backward, parts.private)
    again = ordered(found.plan, list(reversed(found.kernels)), found.private)
    assert tuple(again) == found.kernels
