"""Compile all kernels of a decoder at once, in QuACK's pool of worker processes.

Without it kernels are compiled one by one, each when it is first launched. The calls of one step
are recorded on meta tensors, which costs no memory and launches nothing; then each is made on
tensors of its shapes, and one whose kernel is still being compiled goes to the end of the queue,
while Triton kernels are compiled in this process.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import replace
from typing import Any

import torch
from measure import device
from recorder import Call, record
from torch import Tensor

from codetta.language.types import Kind
from codetta.nn.block import ADJACENT, BACKWARD, ENTRY, EXIT, MIDDLE, Spec, head, segment
from codetta.nn.function import apply_plan
from codetta.plan import Plan

LONGEST = 180.0  # seconds


def decoder_calls(spec: Spec, vocabulary: int, tokens: int, dtype: torch.dtype) -> list[Call]:
    """Every distinct codetta call of a training step of a decoder."""
    calls: dict[object, Call] = {}
    plans = [(segment(replace(spec, part=p), ADJACENT), BACKWARD) for p in (ENTRY, MIDDLE, EXIT)]
    for plan, rules in [*plans, (head(spec.hidden, vocabulary), ())]:
        for call in plan_calls(plan, rules, spec, tokens, dtype):
            shapes = tuple((x.shape, x.stride(), x.dtype) for x in call.tensors)
            calls.setdefault((call.op, str(call.arguments[0][0]), shapes), call)
    return list(calls.values())


def plan_calls(plan: Plan, rules: Any, spec: Spec, tokens: int, dtype: torch.dtype) -> list[Call]:
    """The codetta calls of a Plan's forward and backward."""
    given = {i.name: meta_input(i, spec, tokens, dtype) for i in plan.inputs}

    def step() -> None:
        outputs = list(apply_plan(plan, given, rules).values())
        wanted = [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.grad(outputs, wanted, [torch.empty_like(x) for x in outputs])

    calls, _ = record(step)
    return [c for c in calls if c.op.startswith("codetta::")]


def meta_input(i: Any, spec: Spec, tokens: int, dtype: torch.dtype) -> Any:
    t = i.type
    if t.kind is Kind.ROTARY:
        table = torch.empty(tokens, spec.rotary_dim, device="meta")
        return table, torch.empty(tokens, dtype=torch.int64, device="meta")
    shape = ((tokens if t.rows == "M" else int(t.rows)),) if t.has_rows else ()
    shape += (int(t.cols),) if t.has_cols else ()
    wide = torch.float32 if i.name == "r" else dtype
    x = torch.empty(shape, dtype=wide, device="meta")
    return x.requires_grad_() if i.name != "is_qk" else x


def precompile(calls: list[Call]) -> dict[str, float]:
    """Make each call once, compiling in parallel; seconds and counts."""
    os.environ.setdefault("QUACK_COMPILE_WORKERS", str(len(os.sched_getaffinity(0))))
    from quack.cache.async_compile import CompilePending, pool_scope

    begun, queue, waiting, retries = time.monotonic(), deque(calls), 0, 0
    with pool_scope():
        while queue:
            call = queue.popleft()
            try:
                call.again(*(real(x) for x in call.tensors))
                waiting = 0
            except CompilePending:
                queue.append(call)
                waiting, retries = waiting + 1, retries + 1
                if time.monotonic() - begun > LONGEST:
                    raise TimeoutError(
                        f"{len(queue)} kernels not compiled in {LONGEST} s"
                    ) from None
                if waiting >= len(queue):  # nothing is ready
                    waiting = 0
                    time.sleep(0.1)
    torch.cuda.synchronize()
    return {"calls": len(calls), "retries": retries, "seconds": time.monotonic() - begun}


def real(x: Tensor) -> Tensor:
    """A tensor like x with memory; integers are zero, so that they index something."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device())
    return made if x.is_floating_point() else made.zero_()
