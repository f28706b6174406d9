"""The best configuration of one GEMM kernel of one shape, by measurement.

Three rounds: every candidate that compiled without heavy spills a few times, the fastest few more
often, the winner with other raster orders. Each candidate's stores are compared with the first
one's, so that a fast kernel that is wrong does not win.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from codetta.backends.cuda.assembly import Call, describe
from codetta.backends.cuda.configs import Configuration
from codetta.tuning.space import Problem, raster_variants
from codetta.tuning.timing import Measure, Times
from codetta.tuning.workers import Statics

_SPILLS = 64  # more of them never won
_FINALISTS = 4
_APART = 2e-2  # relative, by norm: bf16 rounds at 2^-9, and orders of summation differ

Run = Callable[[], Any]
Guard = Callable[[Configuration, Run], Any]


@dataclass
class Candidate:
    """A configuration with what is known and measured of it; ``note`` says why it dropped out."""

    config: Configuration
    statics: Statics
    times: Times | None = None
    note: str = ""

    def data(self) -> dict[str, Any]:
        known: dict[str, Any] = {
            "config": self.config.data(),
            "stages": self.statics.stages,
            "spills": self.statics.spills,
        }
        if self.times is not None:
            known |= {"median_ms": round(self.times.median, 5), "min_ms": round(self.times.best, 5),
                      "count": len(self.times.ms)}  # fmt: skip
        return known | ({"note": self.note} if self.note else {})


@dataclass(frozen=True)
class Found:
    """Candidates, fastest first, and the times of what they are compared with."""

    candidates: tuple[Candidate, ...]
    others: Mapping[str, Times]

    @property
    def best(self) -> Candidate | None:
        return next((c for c in self.candidates if c.times is not None), None)


def search(
    problem: Problem,
    given: tuple[Tensor, Tensor, list[Tensor]],
    configs: Sequence[tuple[Configuration, Statics]],
    measure: Measure,
    *,
    others: Mapping[str, Run] | None = None,
    quick: int = 5,
    final: int = 20,
    late: Callable[[], bool] = lambda: False,
    guard: Guard = lambda config, run: run(),
) -> Found:
    """Measure and rank.

    Args:
        given: a, b and the flat operands.
        configs: with what is known of their kernels.
        measure: see :class:`codetta.tuning.timing.GpuTimer`.
        others: work to time beside the finalists, such as the plain product.
        quick, final: repetitions of the two rounds.
        late: when it says True, what has been measured so far decides.
        guard: runs the first launch of a kernel.
    """
    candidates = [Candidate(c, s) for c, s in configs]
    runs = prepared(problem, given, candidates, late, guard)
    named = {str(i): c for i, c in enumerate(candidates) if id(c) in runs}
    _timed(measure, {n: runs[id(c)] for n, c in named.items()}, named, quick)
    best = _ranked(candidates)[:_FINALISTS]
    if best and not late():
        for config in raster_variants(best[0].config):
            variant = Candidate(config, best[0].statics)
            runs |= prepared(problem, given, [variant], late, guard)
            if id(variant) in runs:
                candidates.append(variant)
                best.append(variant)
    finalists = {str(i): c for i, c in enumerate(best)}
    work = {n: runs[id(c)] for n, c in finalists.items()} | dict(others or {})
    for c in best:
        c.times = None
    found = _timed(measure, work, finalists, max(quick if late() else final, 1))
    return Found(tuple(_finalists_first(best, candidates)), found)


def _timed(
    measure: Measure, runs: Mapping[str, Run], named: Mapping[str, Candidate], count: int
) -> dict[str, Times]:
    """Times of what is no candidate; the candidates get theirs."""
    if not runs:
        return {}
    measure(runs, 1)  # warm
    rest = {}
    for name, times in measure(runs, count).items():
        if name in named:
            named[name].times = times
        else:
            rest[name] = times
    return rest


def _ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    timed = [(c.times.median, i) for i, c in enumerate(candidates) if c.times is not None]
    return [candidates[i] for _, i in sorted(timed)]


def _finalists_first(best: list[Candidate], candidates: list[Candidate]) -> list[Candidate]:
    """Finalists by their longer measurement, then the others."""
    first = _ranked(best)
    rest = [c for c in _ranked(candidates) if c not in first]
    return [*first, *rest, *(c for c in candidates if c.times is None)]


def prepared(
    problem: Problem,
    given: tuple[Tensor, Tensor, list[Tensor]],
    candidates: Sequence[Candidate],
    late: Callable[[], bool] = lambda: False,
    guard: Guard = lambda config, run: run(),
) -> dict[int, Run]:
    """Launchers of the candidates that can run and agree with the first, by id."""
    usable = [c for c in candidates if not c.statics.error]
    lean = [c for c in usable if c.statics.spills <= _SPILLS]
    for c in candidates:
        if c.statics.error:
            c.note = c.statics.error
        elif lean and c not in lean:
            c.note = "spills"
    runs: dict[int, Run] = {}
    shared: dict[str, Tensor] = {}
    reference: dict[str, Tensor] = {}
    for c in lean or usable:
        if late() and runs:
            c.note = "not reached"
            continue
        try:
            a, b, operands = given
            call = describe(problem.program, a, b, operands, config=c.config)
            run = launcher(call, a, b, operands, shared)
            if a.device.type == "cuda":
                stored = guard(c.config, partial(_first, run, shared))
                reference = reference or stored
                apart = max((_apart(stored[n], reference[n]) for n in stored), default=0.0)
                if not apart < _APART:
                    c.note = f"differs by {apart:.2g}"
                    continue
            runs[id(c)] = run
        except Exception as error:
            c.note = f"{type(error).__name__}: {str(error)[:200]}"
    return runs


def launcher(
    call: Call, a: Tensor, b: Tensor, operands: Sequence[Tensor], shared: dict[str, Tensor]
) -> Run:
    """The kernel alone. ``shared``: memory of stores by name, used again by the next launcher."""
    arguments, d = call.prepare(operands)
    for _, memory in call.stores:
        if memory.name:
            arguments[memory.name] = shared.setdefault(memory.name, arguments[memory.name])
        else:
            d = shared.setdefault("", d)
    c = call.feed_c(operands) if call.feed_c is not None else None
    a, b = call.feed_a(a), call.feed_b(b)
    return lambda: call.launch(call.plan, a, b, d, c, arguments)


def _first(run: Run, stores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A sample of what a first launch stores, waited for."""
    for x in stores.values():
        x.fill_(float("nan"))
    run()
    sample = {n: x[:: max(1, x.shape[0] // 4096)].clone() for n, x in stores.items()}
    torch.cuda.synchronize()
    return sample


def _apart(x: Tensor, y: Tensor) -> float:
    x, y = x.float(), y.float()
    return float((x - y).norm() / y.norm().clamp_min(torch.finfo(torch.float32).tiny))
