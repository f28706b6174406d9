"""Weights that lie side by side are read where they lie; all others are packed, as ever."""

from __future__ import annotations

import pytest
import torch
from helpers.spy import Spy
from hypothesis import given
from hypothesis import strategies as st

from codetta.language import round_to, silu, unpack
from codetta.plan import PlanBuilder, cost_table, evaluate, run, schedule, totals
from codetta.plan.rules.products import mm
from codetta.plan.sides import packed_sides, sides

COLS = 16
ROWS = {"a": 8, "b": 8, "c": 4, "d": 12}


def plan_of(form, shown=False):
    """x times a packed weight; with ``shown`` the packed weight is an output, too."""
    p = PlanBuilder("packed")
    x, w = p.tile("x", "M", COLS), {n: p.weight(n, rows, COLS) for n, rows in ROWS.items()}
    whole = form(p, w)
    p.output("z", silu(mm(p, "nt", x, whole)))
    if shown:
        p.output("whole", whole)
    return p.build()


def stacked(p, w):
    return p.emit("stack_rows", w["a"], w["b"], w["c"])


def in_turn(p, w):
    return p.emit("interleave_rows", w["a"], w["b"])


def nested(p, w):
    """[a, then b and a stack of others in turn]: every composition of the two."""
    both = p.emit("stack_rows", w["a"], w["c"])
    return p.emit("stack_rows", w["b"], p.emit("interleave_rows", both, w["d"]))


def twice(p, w):
    return p.emit("stack_rows", w["a"], w["a"])


def permuted(p, w):
    attrs = {"head_dim": 4, "rotary_dim": 4, "heads": 2, "inverse": False}
    return p.emit("permute_rows", p.emit("stack_rows", w["a"], w["b"]), **attrs)


def folded(p, w):
    return p.emit("stack_rows", w["a"], w["b"]) * p.row("gamma", COLS)


FORMS = [stacked, in_turn, nested]
each_form = pytest.mark.parametrize("form", FORMS)


def inputs_of(plan, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    found = {"x": torch.randn(6, COLS, generator=g).to(dtype)}
    for i in plan.inputs[1:]:
        found[i.name] = torch.randn(int(i.type.rows), COLS, generator=g).to(dtype)
    return found


def packing(plan):
    """What its schedule packs."""
    made = schedule(plan)
    found = [packed_sides(made, k) for k in made.kernels if k.kind == "prepare"]
    return found[0] if found else None


def laid_out(plan, given, spare=0):
    """The inputs with their weights as views of one storage, ``spare`` elements into it."""
    found = packing(plan)
    memory = torch.full((spare + found.rows * found.cols,), torch.nan, dtype=given["x"].dtype)
    views = {}
    for m in found.members:
        size, at = given[m.name].shape, spare + m.first * COLS
        views[m.name] = memory.as_strided(size, (m.step * COLS, 1), at).copy_(given[m.name])
    assert not memory[spare:].isnan().any()  # all of it, and nothing twice
    return given | views


def results(plan, given):
    """(outputs, preparations that ran, what a dispatch trace of it shows)."""
    with Spy() as spy:
        found = run(schedule(plan), given)
    return found, spy.names.count("prepare")


@each_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spare", [0, 48])
def test_the_layout_is_that_of_the_packed_matrix(form, dtype, spare):
    plan = plan_of(form)
    given = inputs_of(plan, dtype)
    lying = laid_out(plan, given, spare)
    apart, there = results(plan, given), results(plan, lying)
    assert (apart[1], there[1]) == (1, 0)
    assert torch.equal(apart[0]["z"], there[0]["z"])
    direct = run(schedule(plan), lying)  # nobody watches
    assert torch.equal(direct["z"], apart[0]["z"])


@each_form
def test_the_packed_matrix_is_a_view_without_history(form):
    plan = plan_of(form)
    found, lying = packing(plan), laid_out(plan, inputs_of(plan), 16)
    weights = [lying[m.name].requires_grad_() for m in found.members]
    whole = found.whole(weights)
    expected = evaluate(plan_of(form, shown=True), **lying)["whole"]
    assert torch.equal(whole, expected)
    assert whole.is_contiguous() and not whole.requires_grad
    assert whole.untyped_storage().data_ptr() == weights[0].untyped_storage().data_ptr()


@pytest.mark.parametrize("change", ["copied", "elsewhere", "moved", "order", "dtype", "strides"])
def test_anything_else_is_packed(change):
    plan = plan_of(stacked)
    given = inputs_of(plan)
    lying, found = laid_out(plan, given, 16), packing(plan)
    a, b = lying["a"], lying["b"]
    if change == "copied":
        lying["b"] = b.clone()
    elif change == "elsewhere":  # at the same place of another storage
        lying["b"] = laid_out(plan, given, 16)["b"]
    elif change == "moved":
        lying = {n: x if n == "x" else x.clone() for n, x in lying.items()}
    elif change == "order":
        lying["a"], lying["b"] = b, a
    elif change == "dtype":
        lying["b"] = b.view(torch.int32)
    else:
        lying["c"] = lying["c"].as_strided((4, COLS), (1, 4))
    weights = [lying[m.name] for m in found.members]
    assert found.whole(weights) is None
    if change != "dtype":
        named, expected = results(plan, lying), evaluate(plan, **lying)
        assert named[1] == 1
        torch.testing.assert_close(named[0]["z"], expected["z"])


@pytest.mark.parametrize("form", [twice, permuted, folded])
def test_other_preparations_are_no_view_of_weights(form):
    assert packing(plan_of(form)) is None


def test_a_packed_matrix_that_is_returned_is_a_fresh_tensor():
    plan = plan_of(stacked, shown=True)
    assert packing(plan) is None
    lying = laid_out(plan_of(stacked), inputs_of(plan))
    whole = run(schedule(plan), lying)["whole"]
    assert whole.untyped_storage().data_ptr() != lying["a"].untyped_storage().data_ptr()


def test_a_kernel_that_packs_and_casts_must_run():
    p = PlanBuilder("narrow")
    x = p.tile("x", "M", COLS)
    a, b = (p.weight(n, 8, COLS) for n in "ab")
    p.output("z", mm(p, "nt", x, round_to(p.emit("stack_rows", a, b), "bf16")))
    assert packing(p.build()) is None


@given(st.data())
def test_every_composition_has_the_rows_of_the_evaluated_matrix(data):
    p = PlanBuilder("random")
    weights = [p.weight(f"w{i}", data.draw(st.integers(1, 3)), 2) for i in range(6)]
    while len(weights) > 1:
        a, b = weights.pop(0), weights.pop(0)
        turns = a.type.rows == b.type.rows and data.draw(st.booleans())
        weights.append(p.emit("interleave_rows" if turns else "stack_rows", a, b))
    p.output("whole", weights[0])
    plan = p.build()
    given = {
        i.name: torch.full((int(i.type.rows), 2), float(k)).add_(
            torch.arange(int(i.type.rows))[:, None] / 8
        )
        for k, i in enumerate(plan.inputs)
    }
    (whole,) = evaluate(plan, **given).values()
    found = sides(plan, plan.outputs[0].node)
    assert len(found.members) == 6
    for name, first, step in found.members:
        rows = first + step * torch.arange(len(given[name]))
        assert torch.equal(whole[rows], given[name])


def test_costs_are_those_of_the_kernels_that_run():
    p = PlanBuilder("mlp")
    x, g, u = p.tile("x", "M", COLS), p.weight("a", 8, COLS), p.weight("b", 8, COLS)
    gate, up = unpack(mm(p, "nt", x, p.emit("interleave_rows", g, u)))
    p.output("y", silu(gate) * up)
    made = schedule(p.build())
    (found,) = [packed_sides(made, k) for k in made.kernels if k.kind == "prepare"]
    before, after = (cost_table(made, tokens=6, packed=packed) for packed in ((), (found,)))
    assert [r for r in before if r.role != "prepare"] == after
    saved = totals(before)["memory"]["bytes"]
    assert saved == 2 * 2 * 8 * COLS * torch.bfloat16.itemsize
