"""The text form of Plans, their identity, and the errors of building, reading and running one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from plan_oracle import for_run, random_inputs
from plan_samples import FORWARD, applied, decoder_layer, fused, layer_norm_link, trainable
from plan_strategies import examples, plans

from codetta.errors import (
    CodettaError,
    ForeignValue,
    MissingRule,
    PlanInput,
    PlanShape,
    ProgramSyntax,
)
from codetta.language import silu
from codetta.language.values import Value
from codetta.plan import Plan, PlanBuilder, differentiate, evaluate, run, schedule
from codetta.plan.operations import operation
from codetta.plan.rebuild import rewrite
from codetta.plan.text import format_plan


@examples(40)
@given(plan=plans())
def test_text_is_read_back_to_an_equal_plan(plan: Plan) -> None:
    for p in (plan, differentiate(applied(plan, FORWARD), trainable(plan))):
        read = Plan.parse(str(p))
        assert read == p and hash(read) == hash(p) and read.digest == p.digest
        assert len(p.line.splitlines()) == 1 and Plan.parse(p.line) == p


def test_the_mark_of_scores_survives_the_text() -> None:
    plan = decoder_layer(scores_only=True)
    assert "output qkv = %43 scores_only" in str(plan)
    assert Plan.parse(str(plan)).outputs[1].scores_only


def test_a_plan_forgets_how_it_was_written() -> None:
    """Unused inputs, dead values, repeated expressions and statement order leave no trace."""

    def build(swapped: bool) -> Plan:
        b = PlanBuilder("gated")
        x, wg, wu = b.tile("x", "M", 4), b.weight("wg", 3, 4), b.weight("wu", 3, 4)
        b.mm(x, wg.t()) * 2.0
        if swapped:
            b.tile("unused", "M", 9)
            up = b.mm(x, wu.t())
            gate = b.mm(x, wg.t())
        else:
            gate, up = b.mm(x, wg.t()), b.mm(x, wu.t())
        b.output("y", silu(gate) * up)
        return b.build()

    assert build(False) == build(True)


def test_sizes_can_be_printed_beside_the_operations() -> None:
    assert "%2 = mm(%0, %1, layout=nt)" in str(decoder_layer())
    line = next(x for x in format_plan(decoder_layer(), sizes=True).splitlines() if "mm(%0" in x)
    assert line.endswith("# (M, 8)")


# ------------------------------------------------------------------------------------ errors
HEADER = "plan f(x: Tile(M, 4), param w: Tile(3, 4)) {\n"
BODY = "  %0 = operand(name=x)\n  %1 = operand(name=w)\n  %2 = mm(%0, %1, layout=nt)\n"
UNREADABLE = {
    "no header": ("x", 1, "plan NAME"),
    "unknown kind": ("plan f(x: Matrix(M, 4)) {\n}", 1, "Kind"),
    "skipped number": (HEADER + "  %1 = operand(name=x)\n}", 2, "%0"),
    "unknown operation": (HEADER + "  %0 = operand(name=x)\n  %1 = cube(%0)\n}", 3, "cube"),
    "unknown input": (HEADER + "  %0 = operand(name=y)\n}", 2, "operand"),
    "later node": (HEADER + "  %0 = neg(%1)\n}", 2, "%1"),
    "output of nothing": (HEADER + BODY + "  output y = %7\n}", 5, "output"),
    "nonsense": (HEADER + BODY + "  y := %2\n}", 5, "output NAME"),
    "missing attribute": (HEADER + BODY.replace(", layout=nt", "") + "  output y = %2\n}", 4, "mm"),
    "unclosed": (HEADER + BODY + "  output y = %2", 5, "}"),
    "empty": ("", 1, "plan NAME"),
}


@pytest.mark.parametrize("text, line, hint", UNREADABLE.values(), ids=list(UNREADABLE))
def test_unreadable_text_is_refused_with_its_line(text: str, line: int, hint: str) -> None:
    for form in (text, text.replace("\n", ";")):
        with pytest.raises(ProgramSyntax) as error:
            Plan.parse(form)
        assert error.value.fields["line"] == line
        assert hint in str(error.value)


def test_text_that_contracts_unequal_sizes_is_refused() -> None:
    with pytest.raises(PlanShape, match="4 is contracted with 5"):
        Plan.parse(HEADER.replace("(3, 4)", "(3, 5)") + BODY + "  output y = %2\n}")


def builder() -> tuple[PlanBuilder, Value, Value]:
    b = PlanBuilder("f")
    return b, b.tile("x", "M", 4), b.weight("w", 3, 5)


def test_sizes_that_do_not_fit_are_named() -> None:
    b, x, w = builder()
    with pytest.raises(PlanShape, match=r"sizes \(M, 4\), \(3, 5\): 4 is contracted with 5"):
        b.emit("mm", x, w, layout="nt")
    with pytest.raises(PlanShape, match="rows differ"):
        b.emit("cat_cols", x, w)
    with pytest.raises(PlanShape, match="out of range"):
        b.emit("slice_cols", x, start=2, stop=9)
    with pytest.raises(PlanShape, match="columns differ"):
        b.emit("stack_rows", w, b.weight("v", 3, 4))
    with pytest.raises(PlanShape, match="it takes matrices"):
        b.emit("mm", x, b.row("g", 4), layout="nt")
    with pytest.raises(CodettaError):
        x + w


def test_one_name_means_one_input() -> None:
    b, _, _ = builder()
    with pytest.raises(PlanShape, match="the types differ"):
        b.tile("x", "M", 5)


def test_only_one_argument_of_a_contraction_is_transposed() -> None:
    b = PlanBuilder("f")
    x, w = b.tile("x", "M", 4), b.weight("w", 3, 4)
    with pytest.raises(ForeignValue, match="both arguments transposed"):
        b.mm(x.t(), w.t())


def test_values_of_two_plans_do_not_mix() -> None:
    b, x, _ = builder()
    other = PlanBuilder("g").tile("y", "M", 4)
    with pytest.raises(ForeignValue):
        b.emit("add", x, other)


def test_an_unknown_operation_names_its_table() -> None:
    with pytest.raises(MissingRule, match="OPERATIONS"):
        operation("cube")


def test_a_rule_must_keep_the_type() -> None:
    with pytest.raises(PlanShape, match="keep the type"):
        rewrite(layer_norm_link(), lambda b, n, args: args[1] if n.op == "mm" else None)


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_inputs_are_matched_by_name(change: str) -> None:
    plan = layer_norm_link()
    inputs = random_inputs(plan, 3)
    if change == "missing":
        del inputs["g"]
    else:
        inputs["extra"] = torch.ones(3)
    with pytest.raises(PlanInput, match="layer_norm_link"):
        evaluate(plan, **inputs)
    with pytest.raises(PlanInput, match="layer_norm_link"):
        run(schedule(plan), inputs)


def test_a_listing_reads_at_a_hundred_columns() -> None:
    parts = fused(decoder_layer(bias=True))
    for plan in (parts.forward, parts.backward):
        lines = str(schedule(plan)).splitlines()
        assert max(map(len, lines)) <= 100
    assert "    x2 = round(acc + saved_5)" in str(schedule(parts.forward)).splitlines()


def test_a_listing_names_every_kernel_and_output() -> None:
    parts = fused(decoder_layer())
    text = str(schedule(parts.backward))
    assert text.count("\ngemm ") == 8
    assert all(f"d_{n}" in text for n in trainable(decoder_layer()))
    assert for_run(random_inputs(parts.forward, 2), parts.forward)["rope"][1].tolist() == [0, 1]
