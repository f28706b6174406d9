"""One decoder layer on a GPU: CODA beside everything it competes with, and the floor.

The layer runs from attention output to the next layer's q, k, v (layer_model.py), forward, and
backward with gradients of every weight. Contenders (contenders.py): eager, torch.compile (and its
max-autotune at d2048), Liger's kernels, the paper's form on QuACK's library epilogues, CODA. The
floor is the twelve plain GEMMs that every contender must do, by cuBLAS; also by QuACK's mainloop in
the configurations that plain.py finds on record. max-autotune takes minutes to compile, so it runs
only where it is asked for.

    python benchmarks/layer.py --out results            # all shapes, resumed where it stopped
    python benchmarks/layer.py --out results --shape d2048 --budget 150
    python benchmarks/layer.py --out results/max-autotune --shape d2048 --floor cuBLAS \\
        --contender "torch.compile" --contender "torch.compile max-autotune" --contender coda

How it is timed. All contenders run interleaved in one process on random data. A sample is --steps
(3) consecutive steps between two CUDA events, so the host runs ahead as in training. Gradients go
to ``.grad`` through ``backward()`` and are cleared before each step: a gradient that is not laid
out as its parameter pays for its copy. CODA's time includes weight folds and packing, finalizers
and the rotary backward; the paper's form holds its weights packed and pays for no packing. Matrices
are many times larger than the L2 cache, so every step starts cold. Backward is not timed alone:
what is reported is forward + backward less forward. Ratios are medians of per-round ratios, with a
95 % bootstrap interval. One JSON file per shape; a shape whose file exists is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from contenders import ASKED_FOR, CONTENDERS, SERIAL, Contender, floor
from layer_model import SHAPES, TINY, TOKENS, Layer, Shape
from measure import (
    Budget,
    environment,
    free,
    gpu_state,
    interleaved,
    lines,
    peak,
    ratio,
    relative,
    synchronize,
    write_json,
)
from torch import Tensor

__all__ = ["SHAPES", "TOKENS", "Shape", "environment"]

#: Seconds a shape may need: a shape is not begun with less left.
NEEDED = {"d2048": 150}
NEEDED_OTHERWISE = 120


def measure(
    shape: Shape,
    tokens: int,
    rounds: int,
    steps: int,
    names: list[str],
    budget: Budget,
    contenders: dict[str, Callable[[Layer], Contender]] = CONTENDERS,
    floors: tuple[str, ...] = ("cuBLAS", "QuACK"),
) -> dict[str, Any]:
    """Interleaved timings of all contenders at one shape."""
    say = Phases()
    compiling = start_compiling(names)
    layer = Layer.random(shape, tokens)
    say("inputs")
    result: dict[str, Any] = {
        "shape": asdict(shape), "tokens": tokens, "steps_per_sample": steps, "times_ms": {},
        "peak_bytes": {}, "relative_difference_to_eager": {}, "notes": {},
        "environment": environment(),
    }  # fmt: skip
    runs: dict[str, tuple[Callable[[], Any], int]] = {}
    for name, made in (("floor", _cublas), ("floor, QuACK", _quack)):
        if name != "floor" and "QuACK" not in floors:
            continue
        try:
            forward, both = made(layer)
            runs |= {f"{name}/forward": (forward, steps), f"{name}/both": (both, steps)}
        except Exception as error:
            result["notes"][name] = _failed(error)
        say(name)
    reference = gradients(contenders["eager"](layer))
    say("eager's gradients")
    for name in names:
        try:
            begun = time.monotonic()
            if name.startswith("paper"):
                result["notes"]["paper form, compilers"] = finished(compiling)
                say("paper form: compilers")
            contender = contenders[name](layer)
            found = gradients(contender)
            synchronize()
            result["notes"][name] = f"first step {time.monotonic() - begun:.1f} s"
            result["relative_difference_to_eager"][name] = {
                k: relative(found[k], reference[k]) for k in reference
            }
            result["peak_bytes"][name] = peak(contender.both, contender.clear)
            runs |= {f"{name}/forward": (contender.forward, steps)}
            runs |= {f"{name}/both": (contender.both, steps)}
        except Exception as error:
            result["notes"][name] = _failed(error)
        free()
        say(f"{name}: {result['notes'][name]}")
    del reference
    times = interleaved(runs, rounds, budget)
    say(f"{rounds} rounds")
    result["phases_s"] = say.seconds
    result["environment"]["state_after"] = gpu_state()
    for key, found_times in times.items():
        name, what = key.rsplit("/", 1)
        result["times_ms"].setdefault(name, {})[what] = found_times
    result["rounds"] = len(times["floor/both"])
    return result


def _cublas(layer: Layer) -> tuple[Callable[[], None], ...]:
    return floor(layer)


def _quack(layer: Layer) -> tuple[Callable[[], None], ...]:
    from plain import plain, plain_jobs

    from codetta.backends.cuda import quack
    from codetta.tuning.workers import compile_all

    if not layer.x.is_cuda:
        raise RuntimeError("there is no GPU")
    shapes: list[tuple[Tensor, Tensor]] = []

    def note(a: Tensor, b: Tensor) -> Tensor:
        shapes.append((a, b))
        return b

    floor(layer, note)[1]()
    compile_all(plain_jobs(shapes), Path(quack.cache_folder()))
    return floor(layer, plain)


class Phases:
    """Prints and keeps the seconds of each phase, so that a stall shows where it is."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.seconds: dict[str, float] = {}

    def __call__(self, what: str) -> None:
        now = time.monotonic()
        self.seconds[what.split(": first")[0]] = round(now - self.begun, 2)
        print(f"  {now - self.begun:6.1f} s  {what}", flush=True)
        self.begun = now


def start_compiling(names: list[str]) -> list[Any]:
    """Processes that compile the paper's form, where it is asked for and there is a GPU."""
    if not torch.cuda.is_available() or not any(n.startswith("paper") for n in names):
        return []
    try:
        from quack_kernels import start_compiling as start
    except ImportError:  # said when the contender is made
        return []
    return list(start())


def finished(processes: list[Any], limit_s: float = 90.0) -> str:
    """Wait for them; what did not end well is compiled by the first call."""
    end = time.monotonic() + limit_s
    codes: list[int | str] = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.1, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append("stopped")
    processes.clear()
    return f"exit codes {codes}"


def _failed(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {str(error)[:300]}"


def gradients(contender: Contender) -> dict[str, Tensor]:
    """x and all gradients of a step, by the names of the plain layer."""
    contender.clear()
    outputs = contender.forward()
    torch.autograd.backward(outputs, contender.cotangents)
    found = {n: t.grad.clone() for n, t in contender.leaves.items() if t.grad is not None}
    contender.clear()
    named = {f"d_{n}": g for n, g in contender.named(found).items()}
    return {"x": outputs[0].detach().clone()} | named


# ---------------------------------------------------------------------------------- report
def summary(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By contender: medians in ms, ratios to floor and torch.compile with intervals, GiB."""
    times = result["times_ms"]
    found: dict[str, dict[str, Any]] = {}
    for name, t in times.items():
        row: dict[str, Any] = {f"{w}_ms": statistics.median(t[w]) for w in ("forward", "both")}
        row["backward_ms"] = row["both_ms"] - row["forward_ms"]
        for base, label in (("floor", "floor"), ("torch.compile", "compile")):
            for w in ("forward", "both"):
                row[f"{w}/{label}"] = ratio(t[w], times[base][w]) if base in times else None
        row["gib"] = result["peak_bytes"].get(name, 0) / 2**30
        differences = result["relative_difference_to_eager"].get(name, {})
        row["difference"] = max(differences.values(), default=None)
        found[name] = row
    return found


def table(result: dict[str, Any]) -> str:
    s, e = result["shape"], result["environment"]
    head = f"{s['name']}  M {result['tokens']}  {result['rounds']} rounds  {e['gpu']}"
    rows = [
        ("", "forward ms", "backward", "both", "fwd/floor", "both/floor", "both/compile", "GiB")
    ]
    for name, row in summary(result).items():
        cells = [f"{row[k]:.3f}" for k in ("forward_ms", "backward_ms", "both_ms")]
        cells += [interval(row[k]) for k in ("forward/floor", "both/floor", "both/compile")]
        rows.append((name, *cells, f"{row['gib']:.2f}"))
    notes = [f"  {n}: {note}" for n, note in result["notes"].items() if "failed" in note]
    return "\n".join([head, lines(rows), *notes])


def interval(found: tuple[float, float, float] | None) -> str:
    return "" if found is None else f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", action="append", choices=[s.name for s in [*SHAPES, TINY]])
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=3, help="consecutive steps per sample")
    parser.add_argument("--budget", type=float, default=540, help="seconds after which to stop")
    parser.add_argument("--floor", action="append", choices=["cuBLAS", "QuACK"])
    parser.add_argument("--serial", action="store_true", help="compile CODA's kernels one by one")
    args = parser.parse_args(arguments)
    budget = Budget(args.budget)
    if args.serial:
        os.environ[SERIAL] = "1"
    shapes = {s.name: s for s in [*SHAPES, TINY]}
    for name in args.shape or [s.name for s in SHAPES]:
        file = args.out / f"layer_{name}_{args.tokens}.json"
        if not file.exists():
            if budget.left() < min(NEEDED.get(name, NEEDED_OTHERWISE), 0.9 * args.budget):
                print(f"{name}: not begun, {budget.left():.0f} s left; run again to go on")
                break
            torch._dynamo.reset()  # each shape compiles anew; keep clear of the recompile limit
            names = args.contender or [n for n in CONTENDERS if n not in ASKED_FOR]
            floors = tuple(args.floor or ("cuBLAS", "QuACK"))
            made = measure(
                shapes[name], args.tokens, args.rounds, args.steps, names, budget, floors=floors
            )
            write_json(file, made)
            free()
        print(table(json.loads(file.read_text())), flush=True)


if __name__ == "__main__":
    main()
