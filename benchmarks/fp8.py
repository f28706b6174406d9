"""fp8 products with scales against torch._scaled_mm, on one GPU.

    python benchmarks/fp8.py --out results            # the comparison
    python benchmarks/fp8.py --out results --sweep    # tile configurations first
    python benchmarks/fp8.py --tiny                   # every contender once, on any machine

Contenders, shape by shape and interleaved; fast accumulation, a bf16 result unless said:

    scaled_mm            torch._scaled_mm, scales by row and by column: the thing to match
    scaled_mm tensor     torch._scaled_mm, one scale per matrix
    coda                 programs.fp8_scaled
    coda bias            programs.fp8_scaled_bias
    coda e4m3            programs.fp8_quantized: an e4m3 store and the largest magnitude per row

Matrices are random normal, quantized by row. Calls go round four sets of them, so that small ones
do not stay in the L2 cache. Errors are against fp64 products of the quantized matrices, over 512
rows; ``limit`` is twice the error of scaled_mm, for e4m3 twice that of rounding the exact result.

A sweep times configurations per program and shape and writes ``tune_fp8.json``, which
``tune_shapes.py --write-defaults`` reads.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from fp8_contenders import BASE, CONTENDERS, Inputs, Run, cycled, error
from fp8_sweep import SETS, hard_coded, sweep
from measure import (
    Budget,
    environment,
    free,
    gpu_state,
    interleaved,
    lines,
    ratio,
    write_json,
)

from codetta.backends.cuda.configs import Configuration

SHAPES = (
    (16384, 16384, 2048), (8192, 8192, 8192), (4096, 4096, 4096), (16384, 4096, 4096),
    (16384, 8192, 8192),
)  # fmt: skip
TINY = ((64, 48, 32),)


def measure(shape: tuple[int, int, int], rounds: int, budget: Budget) -> dict[str, Any]:
    inputs = [Inputs.random(*shape, seed) for seed in range(SETS)]
    runs: dict[str, Run] = {}
    failed: dict[str, str] = {}
    for name, contender in CONTENDERS.items():
        try:
            contender(inputs[0])
        except Exception as problem:  # a contender that cannot run here is noted
            failed[name] = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
        else:
            runs[name] = cycled(contender, inputs)
    before = gpu_state()
    times = interleaved({name: (run, SETS) for name, run in runs.items()}, rounds, budget)
    return {
        "shape": shape,
        "ms": times,
        "errors": {name: error(name, inputs[0]) for name in runs},
        "failed": failed,
        "state": [before, gpu_state()],
    }


def table(result: dict[str, Any]) -> str:
    m, n, k = result["shape"]
    base = result["ms"].get(BASE)
    rows = [(f"{m} x {n} x {k}", "ms", "TFLOP/s", "speed to scaled_mm", "95 %", "error", "limit")]
    for name, times in result["ms"].items():
        ms = statistics.median(times)
        middle = interval = ""
        if base is not None:
            found = ratio(base, times)  # above 1: faster than scaled_mm
            middle, interval = f"{found[0]:.3f}", f"{found[1]:.3f} to {found[2]:.3f}"
        errors = result["errors"][name]
        rows.append(
            (name, f"{ms:.3f}", f"{2e-9 * m * n * k / ms:.0f}", middle, interval,
             f"{errors['error']:.2e}", f"{errors['limit']:.2e}" if "limit" in errors else "")
        )  # fmt: skip
    notes = [f"{name}: {reason}" for name, reason in result["failed"].items()]
    return "\n".join([lines(rows), *notes])


def wrong(result: dict[str, Any]) -> list[str]:
    """Contenders whose error is above what is allowed."""
    found = []
    for name, e in result["errors"].items():
        if not e["error"] <= e.get("limit", float("inf")) or not e.get("amax", 0.0) <= 1e-2:
            found.append(f"{name} {result['shape']}: {e}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of fp8.json and tune_fp8.json")
    parser.add_argument("--sweep", action="store_true", help="tile configurations, per program")
    parser.add_argument("--shape", type=int, action="append", help="number of a shape; default all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sweep-rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds")
    parser.add_argument("--tiny", action="store_true", help="one small shape, on any machine")
    args = parser.parse_args(arguments)
    budget = Budget(args.budget)
    shapes = TINY if args.tiny else SHAPES
    shapes = tuple(shapes[i] for i in args.shape) if args.shape else shapes
    about = environment()
    kernels: dict[str, Any] = {}
    results: list[dict[str, Any]] = []
    with torch.no_grad():
        for shape in shapes:
            best: dict[str, Configuration] = {}
            if args.sweep and budget.left() > 0:
                for record in sweep(shape, args.sweep_rounds, budget):
                    kernels[f"fp8 {record['name']} {'x'.join(map(str, shape))}"] = record
                    found = Configuration.of(record["best"]["config"], "sweep")
                    assert found is not None
                    best[record["name"]] = found
                    print(f"{record['name']} {shape}: {found} "
                          f"{record['best']['median_ms']:.4f} ms, "
                          f"scaled_mm {record['cublas_ms']:.4f} ms", flush=True)  # fmt: skip
                    if args.out:
                        write_json(
                            args.out / "tune_fp8.json", {"environment": about, "kernels": kernels}
                        )
            if results and budget.left() < 0:
                print(f"out of time before {shape}")
                break
            with hard_coded(best):
                results.append(measure(shape, args.rounds, budget))
            print(table(results[-1]), flush=True)
            if args.out:
                write_json(args.out / "fp8.json", {"environment": about, "results": results})
            free()
    mistakes = [line for result in results for line in wrong(result)]
    print("\n".join(["WRONG", *mistakes]) if mistakes else "all within their limits")
    return len(mistakes)


if __name__ == "__main__":
    raise SystemExit(main())
