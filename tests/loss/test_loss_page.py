"""docs/loss.md: its examples run, and its plans are those that are chosen."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import codetta
from codetta.loss import Problem, choose

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "loss.md").read_text()


def rows(start):
    return re.findall(rf"^\| ({start}.*) \|$", PAGE, re.M)


def what(plan):
    if plan.schedule == "forward":
        return (
            f"forward, {plan.rows} tokens{f', {plan.sum_bits} bits' if plan.sum_bits < 32 else ''}"
        )
    return f"recompute, {plan.chunk} of the {plan.over}"


def test_examples_run_and_print_what_the_page_says(capsys):
    names = {}
    blocks = [b for b in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "group=group" not in b]
    assert len(blocks) >= 3
    for block in blocks:
        exec(block, names)
    said = [line[2:] for b in blocks for line in b.splitlines() if line.startswith("# ")]
    assert capsys.readouterr().out.split("\n")[:-1] == said


def test_first_example_is_the_loss_of_plain_pytorch():
    block = PAGE.split("```python\n")[1].split("```")[0]
    names = {}
    exec(block, names)
    logits = names["hidden"] @ names["weight"].t()
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), names["labels"][:, 1:].flatten()
    )
    torch.testing.assert_close(names["loss"], expected)


@pytest.mark.parametrize("row", rows(r"\d+ \| \d+"))
def test_plans_are_those_that_are_chosen(row):
    d, v, *found = [cell.strip() for cell in row.split("|")]
    problem = Problem(16384, int(d), int(v), torch.bfloat16, True, True, True, shifted=True)
    plans = [choose(problem, limit=gib << 30) for gib in (1, 4)]
    assert found == [x for p in plans for x in (what(p), f"{p.seconds * 1e3:.1f}")]


TWO_SUMS = rows(r"D \d+ \| \d+ \| (?:forward|recompute)")


@pytest.mark.parametrize("row", TWO_SUMS)
def test_plans_with_both_sums_are_those_that_are_chosen(row):
    d, v, *found = [cell.strip() for cell in row.removeprefix("D ").split("|")]
    sizes = (16384, int(d), int(v), torch.bfloat16, True, True, True)
    problems = [Problem(*sizes, shifted=True, wide_sums=w) for w in (False, True)]
    plans = [choose(p, limit=1 << 30) for p in problems]
    assert found == [x for p in plans for x in (what(p), f"{p.seconds * 1e3:.1f}")]


def test_the_table_of_sums_shows_where_they_are_short_and_where_not():
    assert {"24 bits" in row for row in TWO_SUMS} == {True, False}


def test_every_argument_is_on_the_page():
    table = " ".join(rows("`"))
    arguments = inspect.signature(codetta.linear_cross_entropy).parameters
    assert [a for a in arguments if f"`{a}`" not in table] == []
