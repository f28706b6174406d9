"""Where the time of one training step goes: its kernels by torch.profiler, largest first.

    python benchmarks/profile_steps.py loss d2048_v128256 --contender CODA --contender QuACK
    python benchmarks/profile_steps.py llama llama-1b --contender "CODA, no logits"

The contenders are those of loss.py and llama.py, on the same data. Steps run warm; one is timed
with the host running ahead, and one is profiled. Needs a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import loss
import loss_contenders
import torch
from llama import Step
from llama_models import CASES
from llama_models import CONTENDERS as MODELS
from measure import synchronize
from torch.profiler import ProfilerActivity, profile

WARM = 3


def loss_step(shape: str, name: str) -> Callable[[], Any]:
    """Forward and backward of the loss head."""
    found = next(s for s in [*loss_contenders.SHAPES, loss_contenders.TINY] if s.name == shape)
    tiny = found is loss_contenders.TINY
    dtype = torch.float32 if tiny else torch.bfloat16
    head = loss_contenders.Head.random(found, 48 if tiny else loss_contenders.TOKENS, dtype)
    return loss.run(head, loss_contenders.CONTENDERS[name](head), "both")


def llama_step(case: str, name: str) -> Callable[[], Any]:
    """Forward and backward of a whole model."""
    step = Step(CASES[case], "step")
    return step.of(MODELS[name](step.model))


STEPS = {"loss": loss_step, "llama": llama_step}


def on_device(events: Iterable[Any], device: Any) -> list[Any]:
    """What ran on ``device``, without the labels that the profiler repeats there."""
    return [e for e in events if e.device_type == device and not e.is_user_annotation]


def kernels(events: Iterable[Any]) -> list[tuple[str, int, float]]:
    """(name, launches, milliseconds), largest first."""
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in events:
        count, ms = found[event.name]
        found[event.name] = count + 1, ms + event.device_time / 1e3
    return sorted(((n, c, ms) for n, (c, ms) in found.items()), key=lambda row: -row[2])


def idle(events: Iterable[Any]) -> tuple[float, float, list[tuple[str, float]]]:
    """(span of all, milliseconds in it when nothing ran, the longest of these by what followed)."""
    ordered = sorted(events, key=lambda e: e.time_range.start)
    if not ordered:
        return 0.0, 0.0, []
    end = ordered[0].time_range.start
    gaps = []
    for event in ordered:
        gaps.append((event.name, max(0.0, event.time_range.start - end) / 1e3))
        end = max(end, event.time_range.end)
    span = (end - ordered[0].time_range.start) / 1e3
    return span, sum(ms for _, ms in gaps), sorted(gaps, key=lambda row: -row[1])


def report(name: str, run: Callable[[], Any], rows: int) -> str:
    for _ in range(WARM):
        run()
    synchronize()
    begun = time.perf_counter()
    run()
    host = time.perf_counter() - begun
    synchronize()
    wall = time.perf_counter() - begun
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as made:
        run()
        synchronize()
    events = on_device(made.events(), torch.autograd.DeviceType.CUDA)
    found = kernels(events)
    total = sum(ms for _, _, ms in found)
    span, waited, gaps = idle(events)
    head = f"== {name}: {wall * 1e3:.2f} ms, host {host * 1e3:.2f} ms, kernels {total:.2f} ms"
    lines = [f"   {ms:9.3f} ms {count:4d} x {kernel[:170]}" for kernel, count, ms in found[:rows]]
    lines.append(f"   idle {waited:.2f} of {span:.2f} ms, {len(events)} launches; longest before:")
    lines += [f"   {ms:9.3f} ms {kernel[:170]}" for kernel, ms in gaps[: rows // 8]]
    return "\n".join([head, *lines])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=list(STEPS))
    parser.add_argument("size", help="a shape of loss.py, or a case of llama.py")
    parser.add_argument("--contender", action="append", required=True)
    parser.add_argument("--rows", type=int, default=40, help="kernels to print")
    args = parser.parse_args(arguments)
    torch._dynamo.config.recompile_limit = 64  # every contender compiles the same functions
    for name in args.contender:
        print(report(name, STEPS[args.what](args.size, name), args.rows), flush=True)


if __name__ == "__main__":
    main()
