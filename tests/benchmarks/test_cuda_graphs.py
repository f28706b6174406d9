"""benchmarks/cuda_graphs.py runs, and a wrong contender has no times."""

from __future__ import annotations

import json

import cuda_graphs
import pytest
import torch


@pytest.mark.slow
def test_it_runs_and_compares(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(cuda_graphs.COMPILERS, "broken", lambda model: Twice(model))
    names = [x for n in ("CODA, no logits", "broken") for x in ("--contender", n)]
    cuda_graphs.main(["--tiny", "--steps", "2", "--out", str(tmp_path), *names])
    found = json.loads((tmp_path / "cuda_graphs_2.json").read_text())
    assert len(found["times_ms"]["CODA, no logits"]) == 2
    assert max(found["relative_difference_to_eager"]["CODA, no logits"].values()) < 1e-3
    assert "wrong" in found["failed"]["broken"] and "broken" not in found["times_ms"]
    assert "CODA, no logits" in capsys.readouterr().out


class Twice(torch.nn.Module):
    """A model whose loss is twice that of another."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **given):
        out = self.model(**given)
        out.loss = 2 * out.loss
        return out
