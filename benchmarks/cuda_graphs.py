"""A step of few tokens as CUDA graphs: ``mode="reduce-overhead"`` of torch.compile and of CODA.

    python benchmarks/cuda_graphs.py --out results
    python benchmarks/cuda_graphs.py --layers 30 --contender "CODA, no logits"

SmolLM2-135M's sizes with fewer layers (2), 1 x 128 tokens, bf16, forward and backward with the
loss. Such a step is bound by the host, and a graph takes the host out of it. Times are of a wall
clock around a step that ends with the device; the median of --steps after the graphs are there.
The gradients of the last step are compared with those of the uncompiled model. Without a GPU
Inductor makes no graphs, which only tests this script.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from llama import WRONG, Step
from llama_models import CASES
from measure import environment, lines, relative, synchronize, write_json

import codetta

CASE = "smollm2-135m"
#: Steps until every graph has run once as it is, has been recorded and has been replayed.
WARMUP = 5
OPTIONS: dict[str, Any] = {"mode": "reduce-overhead", "dynamic": False}
COMPILERS: dict[str, Callable[[Any], Any]] = {
    "torch.compile": lambda model: torch.compile(model, **OPTIONS),
    "CODA": lambda model: codetta.compile(model, **OPTIONS),
    "CODA, no logits": lambda model: codetta.compile(model, logits="none", **OPTIONS),
}


def measure(case: Any, names: list[str], steps: int) -> dict[str, Any]:
    """Times and differences to eager by contender."""
    step = Step(case, "step")
    found: dict[str, Any] = {
        "environment": environment(),
        "layers": case.sizes["num_hidden_layers"],
    }
    found |= {"times_ms": {}, "relative_difference_to_eager": {}, "failed": {}}

    def run(model: Any) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        loss = model(input_ids=step.ids, labels=step.ids, use_cache=False).loss
        loss.backward()
        return loss.detach().clone()  # a graph's own memory is the next step's

    expected = {"loss": run(step.model)} | step.gradients()
    for name in names:
        torch._dynamo.reset()
        try:
            model, times = COMPILERS[name](step.model), []
            for _ in range(WARMUP + steps):
                step.clear()
                synchronize()
                begun = time.perf_counter()
                loss = run(model)
                synchronize()
                times.append(1e3 * (time.perf_counter() - begun))
            made = {"loss": loss} | step.gradients()
            off = {k: relative(made[k], expected[k]) for k in expected}
            found["relative_difference_to_eager"][name] = off
            if not all(x <= WRONG for x in off.values()):  # NaN is wrong, too
                raise RuntimeError(f"wrong: relative difference to eager {off}")
            found["times_ms"][name] = times[WARMUP:]
        except Exception as error:
            found["failed"][name] = f"{type(error).__name__}: {str(error)[:500]}"
            print(f"  {name}: {found['failed'][name]}", flush=True)
    return found


def table(found: dict[str, Any]) -> str:
    rows = [("", "ms", "to eager")]
    for name, times in found["times_ms"].items():
        off = max(found["relative_difference_to_eager"][name].values())
        rows.append((name, f"{statistics.median(times):.2f}", f"{off:.1e}"))
    return lines(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a small model, on any machine")
    parser.add_argument("--contender", action="append", choices=list(COMPILERS))
    args = parser.parse_args(arguments)
    case = CASES["tiny" if args.tiny else CASE]
    case = replace(case, sizes={**case.sizes, "num_hidden_layers": args.layers})
    found = measure(case, args.contender or list(COMPILERS), args.steps)
    print(table(found))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(args.out / f"cuda_graphs_{args.layers}.json", found)


if __name__ == "__main__":
    main()
