"""Every model's rewritten graph is the same mathematics: equal in fp64 to 1e-12."""

from __future__ import annotations

import capture_models
import pytest
import twin

from codetta.capture.call import RegionCall
from codetta.nn.block import ADJACENT


@pytest.mark.parametrize("name", capture_models.names())
def test_the_fp64_twin_is_equal(name):
    regions = 0
    for module, inputs in twin.captured(name).graphs:
        found = twin.twin(module, inputs)
        found.check(1e-12)
        regions += len(found.report.calls)
    assert regions >= 3 or name in capture_models.BREAKS
    assert regions


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2"])
def test_the_layout_of_the_fused_backend_is_equal_too(name, monkeypatch):
    """With adjacent pairs and permuted heads, which only a GPU would choose."""
    layout, taken = RegionCall.layout, set()

    def as_on_a_gpu(call, fused):
        taken.add(layout(call, True))
        return layout(call, True)

    monkeypatch.setattr(RegionCall, "layout", as_on_a_gpu)
    for module, inputs in twin.captured(name).graphs:
        twin.twin(module, inputs).check(1e-12)
    assert ADJACENT in taken


def test_a_region_without_adjacent_schedules_keeps_halves(monkeypatch):
    module, inputs = twin.captured("llama").graphs[0]
    call = twin.twin(module, inputs).report.calls[0]
    assert call.layout(fused=True) == ADJACENT
    monkeypatch.setattr(RegionCall, "fault", lambda self, pairs: "no schedule")
    assert call.layout(fused=True) != ADJACENT
