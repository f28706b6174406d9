"""The documentation says what the code says: generated pages are current, examples run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

import codetta

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def tool(name):
    return runpy.run_path(str(ROOT / "tools" / f"{name}.py"))


@pytest.mark.parametrize("name", ["program_page", "error_page"])
def test_generated_page_is_current(name):
    made = tool(name)
    current = made["PAGE"].read_text(encoding="utf-8")
    assert current == made["page"](), f"run `python tools/{name}.py`"


def test_table_of_primitives_is_current():
    made = tool("primitive_table")
    current = made["PAGE"].read_text(encoding="utf-8")
    assert made["table"]() in current
    assert current == made["page"](current), "run `python tools/primitive_table.py`"


def test_language_page_names_every_operand_kind():
    text = (DOCS / "language.md").read_text(encoding="utf-8")
    for kind in ("Tile", "Row", "Col", "Scalar", "Index", "Rotary"):
        assert f"| `{kind}" in text


def test_first_example_of_the_language_page_runs(tmp_path):
    text = (DOCS / "language.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    source = tmp_path / "example.py"  # a file, so that errors could name the line
    source.write_text(example, encoding="utf-8")
    a, w, r, x = torch.randn(5, 4), torch.randn(8, 4), torch.rand(5), torch.randn(5, 4)
    names = {"a": a, "w": w, "r": r, "x": x}
    exec(compile(example, str(source), "exec"), names)
    z = (a @ w.t()) * r[:, None]
    y = torch.nn.functional.silu(z[:, 0::2]) * z[:, 1::2] + x
    torch.testing.assert_close(names["out"].y, y)
    torch.testing.assert_close(names["out"].ssq, (y * y).sum(1))
    assert codetta.Program.parse(str(names["gated"])) == names["gated"]


DEAD_ENDS = tool("measure_dead_ends")


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("variance_from_sums", 1e4),
        ("s_from_unrounded_weight", 100.0),
        ("scaled_gradient_in_fp16", 100.0),
        ("u_from_y_and_g", 1000.0),
    ],
)
def test_rejected_form_is_worse_by(name, factor):
    worst = max(rejected / kept for _, rejected, kept in DEAD_ENDS["MEASUREMENTS"][name]())
    assert worst > factor


def test_the_forwards_maximum_is_not_found_again():
    ((_, rejected, kept),) = DEAD_ENDS["maximum_of_the_forward"]()
    assert (rejected < 0.05, kept) == (True, 1.0)


def test_an_unrounded_accumulator_gains_nothing():
    ((_, rejected, kept),) = DEAD_ENDS["unrounded_accumulator"]()
    assert kept < 1.1 * rejected
