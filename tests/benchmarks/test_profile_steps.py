"""The table of kernels, from made-up events; and that the script runs where there is no GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import profile_steps
import pytest
import torch

GPU, CPU = "gpu", "cpu"


def event(name, us, device=GPU, start=0, label=False):
    return SimpleNamespace(
        name=name, device_type=device, device_time=us, is_user_annotation=label,
        time_range=SimpleNamespace(start=start, end=start + us),
    )  # fmt: skip


def test_kernels_are_summed_by_name_and_ordered_by_time():
    events = [event("a", 1000), event("b", 5000), event("a", 2000), event("c", 9000, CPU)]
    events.append(event("codetta::schedule", 8000, label=True))
    found = profile_steps.kernels(profile_steps.on_device(events, GPU))
    assert found == [("b", 1, 5.0), ("a", 2, 3.0)]


def test_idle_is_what_no_kernel_covers():
    events = [
        event("c", 1000, start=9000), event("a", 2000, start=1000),
        event("long", 5000, start=2000), event("beside it", 100, start=3000),
    ]  # fmt: skip
    span, waited, gaps = profile_steps.idle(events)
    assert (span, waited) == (9.0, 2.0)
    assert gaps[0] == ("c", 2.0) and all(ms == 0 for _, ms in gaps[1:])
    assert profile_steps.idle([]) == (0.0, 0.0, [])


def test_the_report_has_kernels_and_idle_time_and_neither_labels_nor_the_host(monkeypatch):
    """Where there is no GPU, a profile holds events of the host alone: here it is made up."""
    device, host = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [
        event("dgrad", 2000, device), event("wgrad", 3000, device, start=6000),
        event("label", 9000, device, label=True), event("on the host", 50000, host),
    ]  # fmt: skip
    made = nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr(profile_steps, "profile", lambda **options: made)
    head, *lines = profile_steps.report("step", lambda: None, 8).split("\n")
    assert head.endswith("kernels 5.00 ms")
    assert [" ".join(x.split()) for x in lines] == [
        "3.000 ms 1 x wgrad", "2.000 ms 1 x dgrad",
        "idle 4.00 of 9.00 ms, 2 launches; longest before:", "4.000 ms wgrad",
    ]  # fmt: skip


@pytest.mark.parametrize("what, size", [("loss", "tiny"), ("llama", "tiny")])
def test_it_runs(what, size, capsys):
    profile_steps.main([what, size, "--contender", "eager", "--contender", "CODA"])
    out = capsys.readouterr().out
    assert out.count("== ") == 2 and "== CODA: " in out and "kernels 0.00 ms" in out
