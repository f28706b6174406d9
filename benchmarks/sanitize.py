"""One small case of every kernel family, for compute-sanitizer.

    python benchmarks/sanitize.py                                   # fills the kernel caches
    compute-sanitizer --tool memcheck python benchmarks/sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/sanitize.py --only residual

A family is what the lowering makes of a program: the epilogue's form, the kinds of what it loads,
its reductions, stores of another width. Of each family the first program of the catalog or the test
cases is run on ragged sizes, so that out-of-bounds lanes exist; then kernels without a GEMM,
accumulation in place, the loss head by each schedule, and a decoder segment forward and backward
(weight preparation, finalizers, rotary backward). Every case is checked against fp64 by the error
budget; one line per case, and the exit status.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import cuda_items
import torch
from cuda_items import (
    HEADS,
    accumulate_check,
    gemm_check,
    head_check,
    pointwise_check,
    segment_check,
)
from helpers.cases import CASES

from codetta import programs
from codetta.backends.cuda.finalize import finalizer
from codetta.backends.cuda.lowering import lower
from codetta.backends.cuda.rules import NotLowerable
from codetta.language.program import Program
from codetta.nn.block import ENTRY, EXIT, MIDDLE, Spec

#: M, N, K: no tile divides them, the last rows and columns are partial.
SHAPE = (77, 208, 72)
Case = tuple[str, Callable[[], tuple[float, str]]]


def family(program: Program) -> tuple[object, ...]:
    """What decides which code a GEMM program's kernel consists of."""
    try:
        lowered = lower(program, "bf16")
    except NotLowerable:
        return ("plain GEMM and one kernel over its result",)
    loads = tuple(sorted({x.port for x in lowered.loads}))
    sinks = tuple(sorted({f"{x.fold} over {x.over}" for x in lowered.sinks}))
    stores = "half-width or second store" if lowered.aux else "one store"
    eights = tuple(sorted({o.dtype for o in program.outputs if o.dtype in ("e4m3", "e5m2")}))
    return lowered.mode, loads, sinks, stores, eights, finalizer(program) is not None


def gemm_families() -> dict[tuple[object, ...], tuple[str, Program]]:
    """The first program of each family."""
    found: dict[tuple[object, ...], tuple[str, Program]] = {}
    ready = {n: e.program for n, e in programs.catalog().items() if e.program.has_acc}
    for name, program in {**ready, **CASES}.items():
        found.setdefault(family(program), (name, program))
    return found


def cases() -> list[Case]:
    dtype = torch.bfloat16
    found: list[Case] = [
        (f"{name} [{describe(key)}]", partial(gemm_check, program, SHAPE, dtype, 0))
        for key, (name, program) in gemm_families().items()
    ]
    found += [
        (f"{name} (no GEMM)", partial(pointwise_check, entry.program, 77, 208, dtype))
        for name, entry in programs.catalog().items()
        if not entry.program.has_acc
    ]
    found += [
        (f"accumulate into {d}", partial(accumulate_check, d)) for d in (torch.float32, dtype)
    ]
    found += [(f"loss head, {name}", partial(head_check, name)) for name in HEADS]
    for part in (ENTRY, MIDDLE, EXIT):
        spec = Spec(part, 64, 96, 4, 2, 16, 16)
        found.append((f"segment {part}", partial(segment_check, spec, 77, dtype)))
    return found


def describe(key: tuple[object, ...]) -> str:
    parts = (", ".join(x) if isinstance(x, tuple) else str(x) for x in key)
    return "; ".join(p for p in parts if p and p not in ("True", "False"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose line contains this")
    parser.add_argument("--budget", type=float, default=540, help="seconds after which to stop")
    parser.add_argument("--list", action="store_true", help="print the cases and run none")
    parser.add_argument("--cpu", action="store_true", help="the reference backend, to test this")
    args = parser.parse_args(arguments)
    if args.cpu:
        cuda_items.DEVICE, cuda_items.BACKEND = "cpu", "reference"
    begun, failed = time.monotonic(), 0
    for name, run in (c for c in cases() if args.only in c[0]):
        if args.list:
            print(name)
            continue
        if time.monotonic() - begun > args.budget:
            print(f"not run    {name}")
            failed += 1
            continue
        try:
            used, note = run()
            if not args.cpu:
                torch.cuda.synchronize()
        except Exception as error:
            used, note = float("inf"), f"{type(error).__name__}: {str(error)[:160]}"
        status = "ok" if used <= 1 else "wrong"
        failed += status != "ok"
        print(f"{status:5} {used:6.3f}  {name}  {note}", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
