"""Tile configurations of the fp8 programs, timed; a part of fp8.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fp8_contenders import (
    BASE,
    CONTENDERS,
    PROGRAMS,
    Inputs,
    Run,
    by_row,
    by_tensor,
    cycled,
    error,
    runs_here,
)
from measure import Budget, interleaved

import codetta
from codetta.backends.cuda.configs import Configuration, ab_stages, family, illegal
from codetta.backends.cuda.lowering import lower

SETS = 4
#: Configurations of a sweep, each spilling little or nothing (tests/cuda/test_fp8_compile.py).
CONFIGURATIONS = tuple(
    Configuration(m, n, pingpong)
    for m, n, pingpong in (
        (128, 128, True), (128, 160, True), (128, 192, True), (64, 256, True), (192, 128, True),
        (256, 128, False), (128, 256, False), (256, 160, False), (256, 192, False),
    )
)  # fmt: skip
#: STL instructions where there are any: quack-kernels 0.6.5.
SPILLS = {("coda e4m3", 128, 192): 40, ("coda e4m3", 192, 128): 30}
#: Seconds to leave for the comparison itself.
RESERVE_S = 60.0


def sweep(shape: tuple[int, int, int], rounds: int, budget: Budget) -> Iterator[dict[str, Any]]:
    """One record per program: all configurations, then variants of the two best."""
    inputs = [Inputs.random(*shape, seed) for seed in range(SETS)]
    base = by_row if runs_here(by_row, inputs[0]) else by_tensor
    plain = statistics.median(
        interleaved({BASE: (cycled(base, inputs), SETS)}, rounds, budget)[BASE]
    )
    for name, program in PROGRAMS.items():
        lowered = lower(program, "fp8")
        first = [c for c in CONFIGURATIONS if illegal(lowered, c) is None]
        times = timed(name, first, inputs, rounds, budget)
        variants = [
            replace(c, **change)
            for c in sorted(times, key=times.__getitem__)[:2]
            for change in ({"cluster_m": 1, "cluster_n": 2}, {"cluster_m": 1}, {"max_swizzle": 16})
        ]
        if budget.left() > 0:
            times |= timed(name, variants, inputs, rounds, budget)
        best = min(times, key=times.__getitem__)
        yield {
            "name": name,
            **{"family": family(lowered), "layout": "nt"},
            **dict(zip("mnk", shape, strict=True)),
            "cublas_ms": plain,
            "ratio_to_plain": times[best] / plain,
            "best": entry(name, lowered, best, times[best]),
            "all": [entry(name, lowered, c, times[c]) for c in sorted(times, key=times.get)],
        }


def timed(
    name: str, configs: list[Configuration], inputs: list[Inputs], rounds: int, budget: Budget
) -> dict[Configuration, float]:
    """Median milliseconds by configuration; those that fail or that are wrong are left out."""
    runs: dict[str, tuple[Run, int]] = {}
    for config in configs:
        if runs and budget.left() < RESERVE_S:  # compiling takes seconds each
            break
        inner = cycled(CONTENDERS[name], inputs)

        def run(config: Configuration = config, inner: Run = inner) -> None:
            with codetta.use_configuration(config):
                inner()

        try:
            with codetta.use_configuration(config):
                found = error(name, inputs[0])
        except Exception as problem:
            print(f"{name} {config}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
            continue
        if not found["error"] <= found["limit"]:
            print(f"{name} {config}: wrong, {found}", flush=True)
            continue
        runs[str(config) + f" s{config.max_swizzle}"] = run, SETS
    by_name = {str(c) + f" s{c.max_swizzle}": c for c in configs}
    times = interleaved(runs, rounds, budget)
    return {by_name[key]: statistics.median(ms) for key, ms in times.items()}


def entry(name: str, lowered: Any, config: Configuration, ms: float) -> dict[str, Any]:
    spills = SPILLS.get((name, *config.tile), 0)
    stages = ab_stages(lowered, config)
    return {"config": config.data(), "median_ms": ms, "stages": stages, "spills": spills}


class hard_coded:
    """Contenders in the configurations that a sweep found, for the duration of a block."""

    def __init__(self, best: dict[str, Configuration]) -> None:
        self.best, self.original = best, dict(CONTENDERS)

    def __enter__(self) -> None:
        for name, config in self.best.items():
            CONTENDERS[name] = configured(self.original[name], config)

    def __exit__(self, *error: object) -> None:
        CONTENDERS.update(self.original)


def configured(contender: Callable[[Inputs], Any], config: Configuration) -> Callable[..., Any]:
    def run(x: Inputs) -> Any:
        with codetta.use_configuration(config):
            return contender(x)

    return run
