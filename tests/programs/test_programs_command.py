"""`codetta programs` as a person at 80 columns and a script see it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from codetta.cli import app
from codetta.language import Program
from codetta.programs import catalog

NAMES = list(catalog())


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["programs", *arguments])


def printed(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_table_has_one_line_per_program_at_80_columns():
    lines = printed().splitlines()
    assert max(map(len, lines)) <= 80
    for entry in catalog().values():
        assert any(entry.name in line and entry.formula in line for line in lines), entry.name


def test_families_are_headings_once_each():
    lines = [line.rstrip() for line in printed().splitlines()]
    for family in {e.family for e in catalog().values()}:
        assert lines.count(family) == 1


@pytest.mark.parametrize("name", NAMES)
def test_printed_program_can_be_copied_and_parsed(name):
    output = printed(name)
    start = output.index("  program ")
    text = output[start : output.index("\n  }", start) + 4]
    assert Program.parse(text) == catalog()[name].program
    assert catalog()[name].program.signature in output


def test_backward_is_printed_for_forward_programs_only():
    assert "gemm wgrad" in printed("swiglu")
    assert "derived backward" not in printed("swiglu_backward")


def test_cost_follows_the_size():
    assert "32 MiB" in printed("identity")
    assert "2 MiB" in printed("identity", "--m", "1024", "--n", "1024", "--k", "1024")


def test_json_list_and_details():
    assert [e["name"] for e in json.loads(printed("--json"))] == NAMES
    details = json.loads(printed("row_scale_swiglu", "--json"))
    assert Program.parse(details["program"]) == catalog()["row_scale_swiglu"].program
    assert details["backward"]["saved"] == ["acc", "z"]
    assert details["cost"]["mainloop_flops"] == 2 * 4096**3


def test_unknown_name_suggests_a_known_one():
    result = invoke("swigl")
    assert result.exit_code == 2
    assert "swiglu" in result.output


def test_size_that_pairs_do_not_divide_is_refused():
    result = invoke("swiglu", "--n", "33")
    assert result.exit_code == 2
    assert "multiple of 2" in result.output
