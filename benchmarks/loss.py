"""The language-model head with its loss on a GPU: CODA beside everything it competes with.

    python benchmarks/loss.py --out results                       # all, resumed where it stopped
    python benchmarks/loss.py --out results --shape d2048_v128256 --budget 120

16384 tokens, width 2048 and 4096, vocabularies 32000, 128256 and 151936, bf16, mean loss, one
target in 16 ignored. Contenders (loss_contenders.py): eager and torch.compile with logits in fp32
as Hugging Face has them, Liger, QuACK, Apple's cut-cross-entropy with its gradient filters off, and
CODA by its own choice, the same with fp32 sums of dW at any price, by each of its schedules. The
floor is the three plain GEMMs that every one of them must do, by cuBLAS in chunks of 4096 rows; and
in one piece, which needs all logits.

How it is timed. All contenders run interleaved in one process on random data. A sample is --steps
consecutive steps between two CUDA events. 'evaluate' is the loss without gradients, 'forward' the
loss with a graph (where gradients are formed in the forward pass, that is here), 'both' is forward
and backward with gradients of x and weight in ``.grad``, cleared before each step. Backward is
both less forward. Ratios are medians of per-round ratios with a 95 % bootstrap interval. Peak
memory is above inputs and gradients. Errors are ‖found - exact‖ / ‖exact‖ against fp64 at the full
size. One JSON file per shape; a shape whose file exists is skipped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from loss_contenders import (
    CONTENDERS,
    GIB,
    SHAPES,
    TINY,
    TOKENS,
    Head,
    Loss,
    Shape,
    floor,
    oracle,
)
from measure import (
    Budget,
    environment,
    free,
    gpu_state,
    interleaved,
    lines,
    peak,
    ratio,
    synchronize,
    write_json,
)
from torch import Tensor

#: Seconds a shape may need: a shape is not begun with less left.
NEEDED = 100
PARTS = ("evaluate", "forward", "both")


def measure(
    shape: Shape,
    tokens: int,
    rounds: int,
    steps: int,
    names: list[str],
    budget: Budget,
    contenders: Mapping[str, Callable[[Head], Loss]] = CONTENDERS,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Errors, memory and interleaved timings of all contenders at one shape."""
    head = Head.random(shape, tokens, dtype)
    result: dict[str, Any] = {
        "shape": asdict(shape), "tokens": tokens, "steps_per_sample": steps, "times_ms": {},
        "extra_bytes": {}, "errors": {}, "first_step_s": {}, "missing": {}, "failed": {},
        "gradient_bytes": head.gradient_bytes(), "environment": environment(),
    }  # fmt: skip
    runs: dict[str, tuple[Callable[[], Any], int]] = {}
    exact = oracle(head)
    for name in names:
        try:
            begun = time.monotonic()
            loss = contenders[name](head)
            found = gradients(head, loss)
            synchronize()
            result["first_step_s"][name] = round(time.monotonic() - begun, 2)
            result["errors"][name] = {k: distance(found[k], exact[k]) for k in exact}
            del found
            free()
            made = {part: run(head, loss, part) for part in PARTS}
            most = peak(made["both"], head.clear)
            result["extra_bytes"][name] = max(0, most - head.gradient_bytes())
            made["evaluate"]()
            runs |= {f"{name}/{part}": (call, steps) for part, call in made.items()}
        except ImportError as error:
            result["missing"][name] = str(error)
        except Exception as error:
            result["failed"][name] = f"{type(error).__name__}: {str(error)[:300]}"
        head.clear()
        free()
        said = result["missing"].get(name) or result["failed"].get(name) or "ready"
        print(f"  {name}: {said}", flush=True)
    del exact
    free()
    for name, rows in (("floor", None), ("floor, one piece", tokens)):
        forward, both = floor(head) if rows is None else floor(head, rows)
        runs |= {f"{name}/forward": (forward, steps), f"{name}/both": (both, steps)}
    times = interleaved(runs, rounds, budget)
    result["environment"]["state_after"] = gpu_state()
    for key, found_times in times.items():
        name, part = key.rsplit("/", 1)
        result["times_ms"].setdefault(name, {})[part] = found_times
    result["rounds"] = len(times["floor/both"])
    return result


def run(head: Head, loss: Loss, part: str) -> Callable[[], None]:
    """One part of a step, from nothing to nothing."""

    def evaluate() -> None:
        with torch.no_grad():
            loss()

    def forward() -> None:
        loss()

    def both() -> None:
        head.clear()
        loss().backward()

    return {"evaluate": evaluate, "forward": forward, "both": both}[part]


def gradients(head: Head, loss: Loss) -> dict[str, Tensor]:
    """The loss and both gradients of one step."""
    head.clear()
    found = loss()
    found.backward()
    assert head.x.grad is not None and head.weight.grad is not None, "a gradient is missing"
    made = {"loss": found.detach(), "d_x": head.x.grad, "d_weight": head.weight.grad}
    head.clear()
    return made


def distance(found: Tensor, exact: Tensor, rows: int = 8192) -> float:
    """‖found - exact‖ / ‖exact‖ in fp64, without a second copy of either."""
    if exact.dim() == 0:
        return float((found.double() - exact).abs() / exact.abs())
    pairs = zip(found.split(rows), exact.split(rows), strict=True)
    off = sum(float((f.double() - e).square().sum()) for f, e in pairs)
    return float((off / float(exact.square().sum())) ** 0.5)


# ---------------------------------------------------------------------------------- report
def summary(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By contender: medians in ms, ratios to floor and to CODA with intervals, GiB, errors."""
    times = result["times_ms"]
    found: dict[str, dict[str, Any]] = {}
    for name, t in times.items():
        row: dict[str, Any] = {p: statistics.median(t[p]) for p in PARTS if p in t}
        row["backward"] = row["both"] - row["forward"]
        row["both/floor"] = ratio(t["both"], times["floor"]["both"])
        row["both/CODA"] = ratio(t["both"], times["CODA"]["both"]) if "CODA" in times else None
        extra = result["extra_bytes"].get(name)
        row["gib"] = None if extra is None else extra / GIB
        row["errors"] = result["errors"].get(name, {})
        found[name] = row
    return found


HEAD = ("", "evaluate", "forward", "backward", "both", "both / floor", "both / CODA",
        "extra GiB", "loss error", "dx error", "dW error")  # fmt: skip


def rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The table's cells, row by row."""
    made = []
    for name, r in summary(result).items():
        cells = [f"{r[k]:.3f}" if k in r else "" for k in HEAD[1:5]]
        cells += [interval(r[k]) for k in ("both/floor", "both/CODA")]
        cells += ["" if r["gib"] is None else f"{r['gib']:.2f}"]
        cells += [
            f"{r['errors'][k]:.1e}" if r["errors"] else "" for k in ("loss", "d_x", "d_weight")
        ]
        made.append((name, *cells))
    return made


def absent(result: Mapping[str, Any]) -> list[str]:
    """A line for each contender that was not timed, saying why."""
    gone = [f"{n}: not installed ({why})" for n, why in result["missing"].items()]
    return gone + [f"{n}: failed: {why}" for n, why in result["failed"].items()]


def interval(found: tuple[float, float, float] | None) -> str:
    return "" if found is None else f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]"


def table(result: Mapping[str, Any]) -> str:
    s, e = result["shape"], result["environment"]
    head = f"{s['name']}  M {result['tokens']}  {result['rounds']} rounds  {e['gpu']}"
    return "\n".join([head, lines([HEAD, *rows(result)]), *absent(result)])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", action="append", choices=[s.name for s in SHAPES])
    parser.add_argument("--tiny", action="store_true", help="a tiny head, to try the script")
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS))
    parser.add_argument("--tokens", type=int, help="16384, or 48 with --tiny")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2, help="consecutive steps per sample")
    parser.add_argument("--budget", type=float, default=540, help="seconds after which to stop")
    args = parser.parse_args(arguments)
    budget = Budget(args.budget)
    shapes = {s.name: s for s in [*SHAPES, TINY]}
    tokens = args.tokens or (48 if args.tiny else TOKENS)
    for name in [TINY.name] if args.tiny else args.shape or [s.name for s in SHAPES]:
        file = args.out / f"loss_{name}_{tokens}.json"
        if not file.exists():
            if budget.left() < min(NEEDED, 0.9 * args.budget):
                print(f"{name}: not begun, {budget.left():.0f} s left; run again to go on")
                break
            torch._dynamo.reset()  # each shape compiles anew; keep clear of the recompile limit
            names = args.contender or list(CONTENDERS)
            made = measure(shapes[name], tokens, args.rounds, args.steps, names, budget)
            write_json(file, made)
            free()
        print(table(json.loads(file.read_text())), flush=True)


if __name__ == "__main__":
    main()
