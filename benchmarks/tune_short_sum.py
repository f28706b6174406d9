"""Tiles of the kernels that add to a sum in 24 or 20 bits, beside other sums and the plain product.

    python benchmarks/tune_short_sum.py --out results
    python benchmarks/tune_sustained.py --out results --write-defaults   # no GPU needed

dW of the loss head (backends/cuda/short_sum.py) at sizes that its plans have. These kernels are no
programs, so tune_sustained.py does not know them; they are measured like its kernels, each in
blocks with launches back to back, and recorded in its format. After each size a sum is compared
with the reference on some of its rows. Needs a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import environment, write_json
from torch import Tensor

from codetta.backends.cuda import quack, short_sum
from codetta.backends.cuda.accumulate import accumulate_
from codetta.backends.cuda.configs import Configuration, ab_stages, family
from codetta.backends.short_sums import joined, low_columns
from codetta.tuning.timing import SustainedTimer

#: V, D, tokens of a chunk, and bits.
Size = tuple[int, int, int, int]
SIZES: tuple[Size, ...] = (
    (151936, 4096, 2048, 20), (128256, 4096, 2048, 24), (151936, 2048, 2048, 24),
    (151936, 4096, 1024, 24), (151936, 4096, 1280, 24), (128256, 2048, 2048, 24),
)  # fmt: skip
CONFIGS = (
    Configuration(128, 128, True, 1, 2), Configuration(128, 128, True, 2, 1),
    Configuration(192, 128, True, 1, 2), Configuration(128, 192, True, 2, 1),
    Configuration(256, 128, False, 1, 2), Configuration(128, 256, False, 2, 1),
    Configuration(128, 160, True, 2, 1),
)  # fmt: skip
#: Spilled registers, counted by compiling for sm_90a (tests/cuda/test_compile_only.py).
SPILLS = {(24, 192, 128): 30, (24, 128, 192): 30}
ROUNDS = 3
#: fp32 sums larger than this are left out.
LARGEST = 3e9
ROWS = 512


def name(kind: str, config: Configuration) -> str:
    return f"{kind} {config}"


def records(size: Size, ms: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """As tune_sustained.py keeps them: of each kind its tiles, the fastest first."""
    found = {}
    m, n, k, bits = size
    for kind in (short_sum.FURTHER,):  # the others are programs in their way, and tuned as such
        lowered = short_sum.lowered_sum(kind, "bf16", bits)
        tiles = sorted((c for c in CONFIGS if name(kind, c) in ms), key=lambda c: ms[name(kind, c)])
        if not tiles:
            continue
        candidates = [
            {"config": c.data(), "stages": ab_stages(lowered, c),
             "spills": SPILLS.get((bits, *c.tile), 0), "median_ms": round(ms[name(kind, c)], 5)}
            for c in tiles
        ]  # fmt: skip
        found[f"{m}x{n}x{k} {kind}"] = {
            "family": family(lowered), "program": f"sum{bits} {kind}", "m": m, "n": n, "k": k,
            "layout": "tn", "operand": "bf16", "best": candidates[0], "candidates": candidates,
            "cublas_ms": round(ms["cublas"], 5),
            "ratio_to_plain": round(candidates[0]["median_ms"] / ms["cublas"], 4),
            "beside": {x: round(t, 5) for x, t in ms.items() if not x.startswith(kind)},
        }  # fmt: skip
    return found


def measured(size: Size, timer: SustainedTimer) -> dict[str, float]:
    """Medians in ms by name."""
    m, n, k, bits = size
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    a = torch.randn(k, m, **options).mul_(k**-0.5).t()
    b = torch.randn(k, n, **options)
    high = torch.empty(m, n, **options)
    low = torch.empty(m, low_columns(n, bits), device="cuda", dtype=torch.uint8)
    work: dict[str, Callable[[], Any]] = {"cublas": partial(torch.mm, a, b)}
    for kind in (short_sum.FIRST, short_sum.FURTHER):
        for config in CONFIGS:
            made = short_sum.call(kind, high, low, a, b, bits, config)
            work[name(kind, config)] = partial(quack.launch, made.plan, *made.arrays)
    if m * n * 4 < LARGEST:
        work["fp32 sum"] = partial(accumulate_, torch.zeros(m, n, device="cuda"), a, b)
    work["bf16 sum"] = partial(accumulate_, torch.zeros(m, n, **options), a, b)
    times = timer(work, ROUNDS)
    compare(high, low, a, b, bits)
    return {x: t.median for x, t in times.items()}


def compare(high: Tensor, low: Tensor, a: Tensor, b: Tensor, bits: int) -> None:
    """Of a first and a further product with the reference."""
    from codetta.backends.calls import REFERENCE

    short_sum.short_sum_(high, low, a, b, bits, True, False)
    parts = high[:ROWS].clone(), low[:ROWS].clone()
    short_sum.short_sum_(high, low, a, b, bits, False, False)
    REFERENCE.gemm_short_sum_(*parts, a[:ROWS], b, bits, False, False)
    found = joined(high[:ROWS], low[:ROWS], bits).double()
    expected = joined(*parts, bits).double()
    off = float((found - expected).norm() / expected.norm())
    assert off < {24: 1e-5, 20: 1e-4}[bits], off  # ties and neighbours of them round otherwise
    print(f"  off by {off:.1e} of the reference", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, action="append", help="of SIZES, counted from 0")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    timer = SustainedTimer(torch.device("cuda", torch.cuda.current_device()))
    data: dict[str, Any] = {"shape": "short_sum", "environment": environment(), "kernels": {}}
    for size in SIZES if args.size is None else [SIZES[i] for i in args.size]:
        ms = measured(size, timer)
        print("x".join(map(str, size)), *(f"{x} {t:.4f}" for x, t in ms.items()), sep=", ")
        data["kernels"] |= records(size, ms)
        write_json(args.out / "sustained_short_sum.json", data)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
