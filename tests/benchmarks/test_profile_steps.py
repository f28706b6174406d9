"""The table of kernels, from made-up events; and that the script runs where there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import profile_steps
import pytest

GPU, CPU = "gpu", "cpu"


def event(name, us, device=GPU):
    return SimpleNamespace(name=name, device_type=device, device_time=us)


def test_kernels_are_summed_by_name_and_ordered_by_time():
    events = [event("a", 1000), event("b", 5000), event("a", 2000), event("c", 9000, CPU)]
    assert profile_steps.kernels(events, GPU) == [("b", 1, 5.0), ("a", 2, 3.0)]


@pytest.mark.parametrize("what, size", [("loss", "tiny"), ("llama", "tiny")])
def test_it_runs(what, size, capsys):
    profile_steps.main([what, size, "--contender", "eager", "--contender", "CODA"])
    out = capsys.readouterr().out
    assert out.count("== ") == 2 and "== CODA: " in out and "kernels 0.00 ms" in out
