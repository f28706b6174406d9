"""Why a fused kernel of the layer takes longer than its plain GEMM: Nsight Compute on one kernel.

    python benchmarks/profile_kernels.py --out results             # the two kernels below, at d2048
    python benchmarks/profile_kernels.py --kernel "swiglu backward" --shape d4096
    python benchmarks/profile_kernels.py --csv FILE                # read what ncu --csv printed

Needs ``ncu`` and permission to read performance counters. The kernel runs a few times in a process
of its own, of which ncu profiles the last; then its plain GEMM does. Printed is how busy the tensor
pipe, the instruction issue and the memory were, registers and occupancy, and the largest reasons
for which warps waited. A tensor pipe that is less busy than in the plain GEMM, at equal memory,
says that the epilogue is not hidden; many issue slots used say that it is its instruction count.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from codetta.author.counters import METRICS, parse, run_ncu

#: What is profiled without --kernel: (form of the epilogue, layout).
KERNELS = {
    "swiglu backward": ("packed_cd_b16x2", "nn"),
    "output projection": ("element", "nt"),
}
RUNS = 4  # before the one that is profiled


# -------------------------------------------------------------------------------- the kernel
def problem(kernel: str, shape: str) -> Any:
    """The kernel of the layer at a shape, as tuning knows it."""
    from layer_model import SHAPES, TOKENS

    from codetta.backends.cuda.lowering import mode_of
    from codetta.tuning.layer import layer_problems

    s = next(s for s in SHAPES if s.name == shape)
    mode, layout = KERNELS[kernel]
    found = layer_problems(TOKENS, s.d, s.f, s.heads, s.kv_heads).values()
    fitting = (p for p in found if p.layout == layout and mode_of(p.program) == mode)
    return next(p for p in fitting if layout == "nn" or (p.n, p.k) == (s.d, s.d))


def child(kernel: str, shape: str, plain: bool) -> None:
    """Launch the kernel: RUNS times, and once more between the marks that ncu looks for."""
    import torch

    from codetta.backends.cuda.launch import CUDA
    from codetta.tuning.space import arrays

    p = problem(kernel, shape)
    a, b, operands = arrays(p, "cuda")

    def run() -> None:
        if plain:
            from plain import plain as product

            product(a, b)
        else:
            CUDA.gemm(p.program, a, b, operands, None, True)

    for _ in range(RUNS):
        run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def profiled(kernel: str, shape: str, plain: bool, limit_s: float) -> str:
    """What ncu prints as CSV about one launch."""
    command = [sys.executable, __file__, "--child", kernel, "--shape", shape]
    return run_ncu([*command, *(["--plain"] if plain else [])], limit_s)


# -------------------------------------------------------------------------------- the reading
def reading(found: dict[str, Any], plain: dict[str, Any] | None = None) -> str:
    """A few lines for people."""
    lines = [found["kernel"][:90]]
    for name in METRICS:
        if name in found:
            beside = f"   plain {plain[name]:12.1f}" if plain and name in plain else ""
            lines.append(f"  {name:16} {found[name]:12.1f}{beside}")
    lines.append(f"  waited for       {_largest(found['stalls'].items())}")
    if plain:
        lines.append(f"    plain          {_largest(plain['stalls'].items())}")
    return "\n".join(lines)


def _largest(stalls: Iterable[tuple[str, float]], count: int = 4) -> str:
    ordered = sorted(stalls, key=lambda x: -x[1])[:count]
    return ", ".join(f"{reason} {x:.2f}" for reason, x in ordered)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kernel", action="append", choices=list(KERNELS))
    parser.add_argument("--shape", default="d2048")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--csv", type=Path, help="read this file and profile nothing")
    parser.add_argument("--limit", type=float, default=100, help="seconds for one profile")
    parser.add_argument("--child", choices=list(KERNELS), help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        child(args.child, args.shape, args.plain)
        return
    if args.csv:
        print(reading(parse(args.csv.read_text())))
        return
    for kernel in args.kernel or KERNELS:
        made = {}
        for which in ("fused", "plain"):
            text = profiled(kernel, args.shape, which == "plain", args.limit)
            made[which] = parse(text)
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                file = args.out / f"ncu_{args.shape}_{kernel.replace(' ', '_')}_{which}"
                file.with_suffix(".csv").write_text(text)
                file.with_suffix(".json").write_text(json.dumps(made[which], indent=1) + "\n")
        print(f"{kernel}, {args.shape}\n{reading(made['fused'], made['plain'])}", flush=True)


if __name__ == "__main__":
    main()
