"""The JSON of each command keeps its form: fields, stages, names and types of facts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_reports import COMMANDS, FILES, form, made

from codetta.author.report import Report
from codetta.author.surroundings import no_gpu

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not no_gpu(), reason="the form recorded is that without a GPU")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_form_is_the_recorded_one(command):
    recorded = json.loads((FILES / f"{command}.json").read_text(encoding="utf-8"))
    assert form(made(command)) == recorded, "if meant: python tests/author/golden_reports.py"


@pytest.mark.parametrize("command", ["check", "verify"])
def test_the_documented_stages_are_those_of_the_command(command):
    page = (ROOT / "docs" / "author-json.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith(f"| `{command}` |"))
    stages = json.loads((FILES / f"{command}.json").read_text(encoding="utf-8"))["stages"]
    assert row == f"| `{command}` | {', '.join('`' + s['name'] + '`' for s in stages)} |"


def test_the_documented_facts_are_those_of_check():
    page = (ROOT / "docs" / "author-json.md").read_text(encoding="utf-8")
    for stage in json.loads((FILES / "check.json").read_text(encoding="utf-8"))["stages"]:
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{stage['name']}` |"))
        assert all(f"`{name}`" in row for name in stage["facts"]), stage["name"]


def test_a_change_of_a_name_or_a_type_is_seen():
    found = made("check")
    Report.model_validate(found)
    before = form(found)
    found["stages"][0]["facts"]["nodes"] = "13"
    assert form(found) != before
    found = made("check")
    found["stages"][0]["facts"]["count"] = found["stages"][0]["facts"].pop("nodes")
    assert form(found) != before
