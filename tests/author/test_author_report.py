"""A report on one screen, and as JSON whose documented form is its real one."""

from __future__ import annotations

import importlib.util
import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from codetta.author.render import LINES, render, verdict
from codetta.author.report import Report, Stage, TensorError, Where

ROOT = Path(__file__).resolve().parents[2]
FAILURE = Stage(
    name="fuzz",
    verdict="failed",
    reason="y is 4 times its budget",
    fix="keep the value in fp32 until the store",
    where=Where(tensor="y", tile=(0, 1), index=(3, 170), expected=1.25, got=math.nan),
    worst=tuple(TensorError(tensor=t, error=0.012, budget=0.003) for t in "abcd"),
    replay="codetta verify x.py --seed 7 --case fuzz:3",
    facts={"cases": 3, "share": math.inf},
)


def passed(name: str, facts: int = 1) -> Stage:
    return Stage(name=name, verdict="passed", facts={f"fact_{i}": i * 1.5 for i in range(facts)})


def report(*stages: Stage, **fields) -> Report:
    given = {"command": "verify", "file": "x.py", "task": "mish", "seed": 7, "elapsed_s": 1.5}
    return Report(**given | fields, stages=stages)


def shown(found: Report, width: int = 80, **options) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, **options)
    console.print(render(found))
    return console.file.getvalue()


# ---------------------------------------------------------------------------------- screen
def test_a_failure_says_where_what_and_how_to_see_it_again():
    text = shown(report(passed("trace"), FAILURE), 120)
    for said in (
        "y is 4 times its budget",
        "first: y[3, 170] (tile 0, 1) is nan, expected 1.25",
        "worst: c 4 x its budget (0.012 of 0.003)",
        "fix: keep the value in fp32 until the store",
        "again: codetta verify x.py --seed 7 --case fuzz:3",
        "cases 3; share inf",
        "FAILED: fuzz  1.5 s; seed 7",
    ):
        assert said in text
    assert "worst: d" not in text  # three are enough


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("stages, facts", [(3, 2), (12, 40), (60, 3), (60, 60), (400, 1)])
def test_it_fits_one_screen_and_keeps_the_failure(width, stages, facts):
    many = [passed(f"stage{i}", facts) for i in range(stages)]
    lines = shown(report(*many, FAILURE), width).splitlines()
    assert len(lines) <= LINES
    assert all(len(line) <= width for line in lines)
    assert "FAILED: fuzz" in lines[-1]
    assert any("again: codetta verify" in line for line in lines)


def test_what_does_not_fit_is_counted():
    warnings = [Stage(name=f"w{i}", verdict="warning", reason="slow") for i in range(50)]
    lines = shown(report(*warnings)).splitlines()
    assert len(lines) == LINES
    shown_warnings = sum(line.startswith("warning") for line in lines)
    assert f"... and {50 - shown_warnings} lines more; --json has everything" in lines


@pytest.mark.parametrize(
    "verdicts, said",
    [
        ([], "NOTHING WAS DONE"),
        (["passed"], "PASSED"),
        (["passed", "skipped"], "skipped: s1"),
        (["passed", "warning"], "warnings: s1"),
        (["passed", "estimate"], "estimated, not measured: s1"),
        (["estimate"], "NOT MEASURED: estimate"),
        (["passed", "noise"], "UNDECIDED: s1 within the noise"),
        (["passed", "noise", "failed"], "FAILED: s2"),
    ],
)
def test_the_last_line_does_not_say_more_than_is_known(verdicts, said):
    found = report(*(Stage(name=f"s{i}", verdict=v) for i, v in enumerate(verdicts)))
    assert said in verdict(found).plain
    assert ("PASSED" in verdict(found).plain) == (
        "passed" in verdicts and not {"failed", "noise"} & set(verdicts)
    )


def test_colours_are_for_terminals():
    assert "\x1b" not in shown(report(FAILURE))
    assert "\x1b" in shown(report(FAILURE), force_terminal=True)


def test_words_of_a_candidate_are_not_markup():
    stage = Stage(name="trace", verdict="failed", reason="x[/red] [bold]y[0]", fix="[link=z]")
    text = shown(report(stage))
    assert "x[/red] [bold]y[0]" in text and "[link=z]" in text


# ------------------------------------------------------------------------------ exit status
@pytest.mark.parametrize(
    "verdicts, status",
    [
        (["passed", "warning", "skipped", "estimate", "noise"], 0),
        (["passed", "failed"], 1),
        ([], 1),
    ],
)
def test_the_exit_status_is_one_if_anything_failed_or_nothing_was_done(verdicts, status):
    stages = [Stage(name=v, verdict=v) for v in verdicts]
    assert report(*stages).exit_status == status


# ------------------------------------------------------------------------------------ json
def test_json_reads_back_with_what_json_has_no_numbers_for():
    found = report(passed("trace"), FAILURE)
    text = found.model_dump_json(indent=2)
    assert '"got": "NaN"' in text and '"share": "Infinity"' in text
    again = Report.model_validate_json(text)
    assert math.isnan(again.stages[1].where.got)
    assert again.model_dump_json(indent=2) == text


def test_the_documented_fields_are_those_of_the_report():
    spec = importlib.util.spec_from_file_location("page", ROOT / "tools" / "author_json_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text(encoding="utf-8")
    assert module.page(page) == page, "run python tools/author_json_page.py"
    for model in (Report, Stage, Where, TensorError):
        assert all(f"| `{name}` |" in page for name in model.model_fields)
