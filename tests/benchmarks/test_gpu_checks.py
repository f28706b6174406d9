"""The scripts that judge kernels on a GPU, run here on the reference backend; cold_start.py."""

import json
import re

import cold_start
import cuda_items
import pytest
import sanitize
import torch

from codetta import programs
from codetta.backends.cuda.forms import ELEMENT, PACKED, PAIR


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(cuda_items, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_items, "BACKEND", "reference")


def test_sanitizer_cases_cover_every_form_and_every_way_to_reduce():
    found = [sanitize.describe(key) for key in sanitize.gemm_families()]
    for wanted in (
        ELEMENT, PAIR, PACKED, "plain GEMM", "rotary", "onehot", "select", "add over n",
        "add over m", r"max\w* over n", r"max\w* over m", "moments", "softm", "half-width",
    ):  # fmt: skip
        assert any(re.search(wanted, x) for x in found), wanted


def test_sanitizer_cases_run_and_report(capsys):
    assert sanitize.main(["--cpu", "--only", "residual"]) == 0
    assert "ok" in capsys.readouterr().out
    assert sanitize.main(["--cpu", "--only", "segment entry"]) == 0


def test_sanitizer_cases_go_every_way_through_the_loss_head(monkeypatch, capsys):
    from codetta.loss import shifted, sums

    bits, rows = [], []
    inner, repaired = sums.run_gemm_short_sum_, shifted.repaired

    def noted(high, low, a, b, n, **kinds):
        bits.append(n)
        inner(high, low, a, b, n, **kinds)

    def watched(part, e, base, total):
        rows.append(int((total > shifted.LIMIT).sum()))
        return repaired(part, e, base, total)

    monkeypatch.setattr(sums, "run_gemm_short_sum_", noted)
    monkeypatch.setattr(shifted, "repaired", watched)
    assert sanitize.main(["--cpu", "--only", "loss head"]) == 0
    assert set(bits) == {20, 24} and set(rows) == {0, 1}
    assert capsys.readouterr().out.count("ok ") == len(cuda_items.HEADS)


def test_a_wrong_loss_head_is_reported(monkeypatch, capsys):
    from codetta.loss import shifted

    right = shifted.of_x
    monkeypatch.setattr(shifted, "of_x", lambda *given: right(*given) * 1.1)
    assert sanitize.main(["--cpu", "--only", "loss head, forward, 20"]) == 1
    assert "wrong" in capsys.readouterr().out


def test_wrong_kernel_is_reported(monkeypatch, capsys):
    import codetta

    right = codetta.gemm
    monkeypatch.setattr(codetta, "gemm", lambda *args, **kwargs: right(*args, **kwargs) * 1.2)
    assert sanitize.main(["--cpu", "--only", "identity"]) == 1
    assert "wrong" in capsys.readouterr().out


def test_budget_allows_twice_eager_and_the_addends_and_no_more():
    exact = torch.full((64,), 3.0, dtype=torch.float64)
    eager = exact + 0.01
    eps = torch.finfo(torch.bfloat16).eps
    out = exact.to(torch.bfloat16)
    assert cuda_items.ratio("x", out, exact, eager, exact.abs()) == 0
    allowed = 2 * 0.01 + 2 * eps * 3.0
    off = (exact + 0.0625).to(torch.bfloat16)
    found = cuda_items.ratio("x", off, exact, eager, exact.abs())
    assert found == pytest.approx(float(off[0] - 3) / allowed)
    with pytest.raises(AssertionError, match="isnan"):
        cuda_items.ratio("x", out * float("nan"), exact, eager, exact.abs())


def test_single_numbers_are_judged_over_several_draws(monkeypatch):
    seeds = []
    drawn = cuda_items.gemm_draw
    monkeypatch.setattr(
        cuda_items, "gemm_draw", lambda *args: seeds.append(args[-1]) or drawn(*args)
    )
    program = programs.catalog()["residual_ssq"].program
    used, _ = cuda_items.gemm_check(program, (1, 256, 64), torch.bfloat16, 0)
    assert seeds == list(range(cuda_items.DRAWS)) and used < 1
    seeds.clear()
    cuda_items.gemm_check(program, (40, 64, 32), torch.bfloat16, 0)
    assert seeds == [0]


@pytest.mark.slow
def test_cold_start_times_its_stages_in_fresh_processes(tmp_path):
    flags = ["--out", str(tmp_path), "--tiny", "--tokens", "16"]
    cold_start.main([*flags, "--mode", "cold", "--mode", "parallel"])
    runs = json.loads((tmp_path / "cold_start.json").read_text())["runs"]
    assert [r["mode"] for r in runs] == ["cold", "parallel"]
    for r in runs:
        whole = sum(s for n, s in r["stages_s"].items() if n != "second step")
        assert r["to_first_step_s"] == pytest.approx(whole)
        assert {"codetta", "plans", "first step"} <= set(r["stages_s"]) and r["loss"] > 0
    assert runs[1]["precompiled"]["kernels"] > 10
