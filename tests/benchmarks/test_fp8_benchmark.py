"""The fp8 benchmark runs, judges its contenders, and its sweep writes what the tuner reads."""

from __future__ import annotations

import json

import fp8
import fp8_contenders
import pytest
import torch
from helpers.fused import running

from codetta.backends.cuda.configs import Configuration


@pytest.mark.parametrize("backend", ["reference", "emulated"])
def test_every_contender_is_measured_and_right(backend, tmp_path, capsys):
    with running(backend):
        assert fp8.main(["--tiny", "--rounds", "2", "--out", str(tmp_path)]) == 0
    (result,) = json.loads((tmp_path / "fp8.json").read_text())["results"]
    assert set(result["errors"]) | set(result["failed"]) == set(fp8_contenders.CONTENDERS)
    assert {"coda", "coda bias", "coda e4m3"} <= set(result["errors"])
    assert "all within their limits" in capsys.readouterr().out


def test_a_wrong_contender_is_named(monkeypatch, capsys):
    right = fp8_contenders.CONTENDERS["coda e4m3"]

    def wrong(x):
        out = right(x)
        return out._replace(y=torch.zeros_like(out.y))

    monkeypatch.setitem(fp8_contenders.CONTENDERS, "coda e4m3", wrong)
    with running("reference"):
        assert fp8.main(["--tiny", "--rounds", "1"]) == 1
    assert "WRONG\ncoda e4m3" in capsys.readouterr().out


def test_a_sweep_keeps_the_best_configuration_of_each_program(tmp_path):
    before = dict(fp8_contenders.CONTENDERS)
    with running("emulated"):
        arguments = ["--tiny", "--rounds", "1", "--sweep-rounds", "1", "--sweep"]
        assert fp8.main([*arguments, "--out", str(tmp_path)]) == 0
    kernels = json.loads((tmp_path / "tune_fp8.json").read_text())["kernels"]
    assert {x["name"] for x in kernels.values()} == set(fp8_contenders.PROGRAMS)
    for record in kernels.values():
        assert record["family"].startswith("fp8 ")
        assert Configuration.of(record["best"]["config"], "test") is not None
        assert record["best"]["median_ms"] == min(x["median_ms"] for x in record["all"])
        assert len(record["all"]) > 5
    assert before == fp8_contenders.CONTENDERS
