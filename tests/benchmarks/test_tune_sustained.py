"""tune_sustained.py without a GPU: which kernels are searched, and what becomes a default."""

import json

import pytest
import torch
import tune_sustained
from helpers.fused import running

import codetta.capture.call
import codetta.capture.pack  # noqa: F401
from codetta.backends import select
from codetta.backends.cuda import launch
from codetta.backends.cuda.configs import illegal
from codetta.backends.cuda.lowering import lower


def test_the_kernels_of_a_model_are_those_of_its_step(monkeypatch):
    with running("emulated"):
        emulated = select.backend_for(torch.empty(1))
        monkeypatch.setattr(launch, "CUDA", emulated)
        found = tune_sustained.model_problems("tiny-qwen3")
    sizes = {(p.m, p.n, p.k, p.layout) for p in found.values()}
    assert {(32, 192, 64, "nt"), (32, 96, 64, "nn"), (640, 64, 32, "tn")} <= sizes
    assert all(p.operand == "bf16" for p in found.values())
    assert (32, 640, 64, "nt") in sizes  # of the head


def test_a_task_has_a_kernel_per_benchmark_size_and_more_candidates():
    found = tune_sustained.task_problems("mish")
    assert {(p.m, p.n, p.k) for p in found.values()} == {(16384, 8192, 2048), (16384, 4096, 4096)}
    for p in found.values():
        usual = tune_sustained.candidates(p, {})
        varied = tune_sustained.candidates(p, {}, tune_sustained.VARIED)
        lowered = lower(p.program, p.operand)
        assert len(varied) > len(usual) and not any(illegal(lowered, c) for c in varied)
        assert {c.tile for c in varied} >= {(128, 160), (128, 96)}


def test_kernels_are_selected_by_size_layout_and_family():
    found = tune_sustained.task_problems("mish")
    assert tune_sustained.selected(found, "") == found
    assert list(tune_sustained.selected(found, "8192x2048 nt element store1")) == [
        "16384x8192x2048"
    ]
    assert not tune_sustained.selected(found, "tn element")


@pytest.mark.parametrize("name, read", [("llama-1b", True), ("tiles_mish", False)])
def test_tasks_do_not_become_defaults(tmp_path, name, read, monkeypatch):
    merged = []
    monkeypatch.setattr(
        tune_sustained.shipped, "merged", lambda text, found: merged.extend(found) or text
    )
    target = tmp_path / "shipped.json"
    target.write_text("{}")
    file = tune_sustained.file_of(tmp_path, name)
    file.write_text(json.dumps({"environment": {}, "kernels": {"k": {}}}))
    tune_sustained.write_defaults(tmp_path, target)
    assert bool(merged) is read
