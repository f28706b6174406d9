"""A training step of whole Hugging Face models on a GPU: CODA beside everything it competes with.

    python benchmarks/llama.py --out results                       # all, resumed where it stopped
    python benchmarks/llama.py --out results --case llama-1b --part step --budget 500
    python benchmarks/llama.py --out results --compile-time llama-1b

Cases: a Llama of 1.24 B parameters, Qwen3-0.6B's sizes, four layers of Llama-8B; bf16, 2 × 8192
tokens; and, if it is named, SmolLM2-135M's sizes with the 1 × 128 tokens of the demo. Parts: 'step'
is forward + backward with the loss head, 'decoder' the same without it, from a random gradient of
the last hidden states. Contenders are in llama_models.py.

How it is timed. All contenders run interleaved in one process on the same parameters; a sample is
--steps consecutive steps between two CUDA events. Gradients end in ``.grad`` and are cleared before
each step; there is no optimizer. CODA's time includes packing and folding weights. Ratios are
medians of per-round ratios with a 95 % bootstrap interval. Peak memory is above the weights.
Compile seconds are those of the first step. One JSON file per case and part; a file that exists is
not measured again.

Compile time (--compile-time) is measured apart: each of torch.compile with a causal fast path and
CODA takes its first step in a new process, with empty cache directories (cold) and again with the
ones just filled (warm).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from llama_models import CASES, CONTENDERS, STEP_ONLY, Case, Contender, build
from measure import (
    Budget,
    device,
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

PARTS = ("step", "decoder")
#: Seconds a part may need: it is not begun with less left.
NEEDED = 240
#: Relative difference to eager beyond which a contender is not timed: what it leaves out (a
#: gradient of zeros is 1 away) would be counted as speed.
WRONG = 0.3
TESTS = ("tiny", "tiny-qwen3")
#: Measured only if it is named.
ASKED_FOR = ("smollm2-135m",)
COMPILED = ("CODA", "torch.compile, causal")
CACHES = ("QUACK_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CODETTA_CACHE_DIR")


class Step:
    """Forward and backward of one part of a case, on shared parameters and fixed data."""

    def __init__(self, case: Case, part: str, dtype: torch.dtype | None = None) -> None:
        self.part = part
        self.dtype = dtype or (torch.bfloat16 if device() == "cuda" else torch.float32)
        self.model = build(case, self.dtype, device())
        self.ids = torch.randint(0, case.sizes["vocab_size"], (case.batch, case.seq))
        self.ids = self.ids.to(device())
        size = (case.batch, case.seq, case.sizes["hidden_size"])
        self.cotangent = torch.randn(size, device=device()).to(self.dtype)

    def clear(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def of(self, contender: Contender) -> Callable[[], Tensor]:
        def run() -> Tensor:
            self.clear()
            if self.part == "step":
                out = contender.loss(self.ids)
                out.backward()
            else:
                out = contender.hidden(self.ids)
                # a copy: some contenders write into the gradient that they are given
                out.backward(self.cotangent.clone())
            return out.detach()

        return run

    def fingerprint(self) -> list[tuple[float, float]]:
        """Of every parameter; a contender must leave them as they are, for all share them."""
        with torch.no_grad():
            return [(float(p.double().sum()), float(p.double().square().sum()))
                    for p in self.model.parameters()]  # fmt: skip

    def gradients(self) -> dict[str, Tensor]:
        """Of weights that every layer's backward has gone into, the embedding (and so a head that
        is tied to it) among them."""
        layers = self.model.model.layers
        named = {
            "embedding": self.model.model.embed_tokens.weight,
            "first norm": layers[0].input_layernorm.weight,
            "first q": layers[0].self_attn.q_proj.weight,
            "last gate": layers[-1].mlp.gate_proj.weight,
            "last down": layers[-1].mlp.down_proj.weight,
        }
        return {n: p.grad.clone() for n, p in named.items()}


def measure(
    case: Case,
    part: str,
    names: list[str],
    rounds: int,
    steps: int,
    budget: Budget,
    contenders: Mapping[str, Callable[[Any], Contender]] = CONTENDERS,
) -> dict[str, Any]:
    """Interleaved timings of all contenders at one part of a case."""
    step = Step(case, part)
    result: dict[str, Any] = {
        "case": asdict(case), "part": part, "steps_per_sample": steps, "times_ms": {},
        "first_step_s": {}, "rewriter_s": {}, "peak_bytes": {}, "relative_difference_to_eager": {},
        "failed": {}, "environment": environment(),
    }  # fmt: skip
    kept = [p.detach().cpu().clone() for p in step.model.parameters()]
    untouched = step.fingerprint()
    reference = step.of(contenders["eager"](step.model))()
    expected = step.gradients() | {"output": reference}
    runs: dict[str, tuple[Callable[[], Any], int]] = {}
    for name in names:
        step.clear()
        free()
        try:
            contender = contenders[name](step.model)
            run = step.of(contender)
            begun = time.perf_counter()
            out = run()
            synchronize()
            result["first_step_s"][name] = time.perf_counter() - begun
            if contender.rewriting:
                result["rewriter_s"][name] = sum(contender.rewriting)
            found = step.gradients() | {"output": out}
            result["relative_difference_to_eager"][name] = {
                k: relative(found[k], expected[k]) for k in expected
            }
            del found, out
            step.clear()
            off = result["relative_difference_to_eager"][name]
            if not all(x <= WRONG for x in off.values()):  # NaN is wrong, too
                shown = ", ".join(f"{k} {x:.2f}" for k, x in off.items())
                raise RuntimeError(f"wrong: relative difference to eager {shown}")
            result["peak_bytes"][name] = peak(run, step.clear)
            runs[name] = (run, steps)
        except Exception as error:
            result["failed"][name] = f"{type(error).__name__}: {str(error)[:500]}"
        if step.fingerprint() != untouched:
            for p, value in zip(step.model.parameters(), kept, strict=True):
                p.data.copy_(value)
            runs.pop(name, None)
            result["failed"][name] = "it wrote into the parameters, which have been restored"
        shown = result["failed"].get(name) or f"first step {result['first_step_s'][name]:.1f} s"
        print(f"  {name}: {shown}", flush=True)
    result["times_ms"] = interleaved(runs, rounds, budget)
    result["environment"]["state_after"] = gpu_state()
    result["rounds"] = len(next(iter(result["times_ms"].values()), []))
    return result


# ------------------------------------------------------------------------------ compile time
def first_step(case: Case, name: str) -> dict[str, float]:
    """Seconds of the first step of a contender, and of the rewriter in it."""
    step = Step(case, "step")
    contender = CONTENDERS[name](step.model)
    run = step.of(contender)
    synchronize()
    begun = time.perf_counter()
    run()
    synchronize()
    first = time.perf_counter() - begun
    begun = time.perf_counter()
    run()
    synchronize()
    return {
        "first_step_s": first,
        "second_step_s": time.perf_counter() - begun,
        "rewriter_s": sum(contender.rewriting),
    }


def compile_time(case: Case, file: Path) -> None:
    """First steps in new processes, with empty and with filled caches; written as they come."""
    found: dict[str, Any] = {"case": asdict(case), "environment": environment()}
    for name in COMPILED:
        with tempfile.TemporaryDirectory() as folder:
            caches = {variable: str(Path(folder) / variable) for variable in CACHES}
            command = [sys.executable, __file__, "--first-step", name, "--case", case.name]
            for state in ("cold", "warm"):
                done = subprocess.run(
                    command, capture_output=True, text=True, env={**os.environ, **caches}
                )
                last = done.stdout.strip().rsplit("\n", 1)[-1]
                found.setdefault(name, {})[state] = (
                    json.loads(last) if done.returncode == 0 else {"failed": done.stderr[-800:]}
                )
                print(f"  {name}, {state}: {found[name][state]}", flush=True)
                write_json(file, found)


# ------------------------------------------------------------------------------------ report
def base(result: dict[str, Any]) -> str | None:
    """Which contender ratios are to: CODA, or where it did not run the first of its options."""
    own = [n for n in result["times_ms"] if n.startswith("CODA")]
    return "CODA" if "CODA" in own else next(iter(own), None)


def summary(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By contender: median ms, its time relative to CODA's with interval, GiB, first step."""
    times, own = result["times_ms"], base(result)
    found: dict[str, dict[str, Any]] = {}
    for name, t in times.items():
        found[name] = {
            "ms": statistics.median(t),
            "speedup": ratio(t, times[own]) if own and name != own else None,
            "gib": result["peak_bytes"][name] / 2**30,
            "first_step_s": result["first_step_s"][name],
            "difference": max(result["relative_difference_to_eager"][name].values()),
        }
    return found


def table(result: dict[str, Any]) -> str:
    case, e = result["case"], result["environment"]
    head = (
        f"{case['name']}, {result['part']}  {case['batch']} x {case['seq']} tokens  "
        f"{result['rounds']} rounds  {e['gpu'] or 'no GPU'}"
    )
    rows = [("", "ms", "ms / CODA's", "GiB", "first step s", "to eager")]
    for name, row in summary(result).items():
        speedup = row["speedup"]
        shown = "" if speedup is None else "{:.3f} [{:.3f}, {:.3f}]".format(*speedup)
        rows.append(
            (name, f"{row['ms']:.2f}", shown, f"{row['gib']:.2f}", f"{row['first_step_s']:.1f}",
             f"{row['difference']:.1e}")
        )  # fmt: skip
    notes = [f"  {name}: failed: {why}" for name, why in result["failed"].items()]
    seconds = [f"  rewriter: {s:.1f} s" for s in result["rewriter_s"].values()]
    return "\n".join([head, lines(rows), *seconds, *notes])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--tiny", action="store_true", help="the small cases, on any machine")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=1, help="consecutive steps per sample")
    parser.add_argument("--budget", type=float, default=540, help="seconds after which to stop")
    parser.add_argument("--compile-time", choices=list(CASES), metavar="CASE")
    parser.add_argument("--first-step", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    cases = args.case or [n for n in CASES if (n in TESTS) == args.tiny and n not in ASKED_FOR]
    torch._dynamo.config.recompile_limit = 64  # every contender compiles the same functions
    if args.first_step:
        print(json.dumps(first_step(CASES[cases[0]], args.first_step)))
        return
    if args.out is None:
        parser.error("--out is where the results go")
    if args.compile_time:
        file = args.out / f"llama_compile_{args.compile_time}.json"
        if not file.exists():
            compile_time(CASES[args.compile_time], file)
        print(file.read_text())
        return
    budget = Budget(args.budget)
    for name in cases:
        for part in args.part or PARTS:
            file = args.out / f"llama_{name}_{part}.json"
            if not file.exists():
                if budget.left() < max(0.0, min(NEEDED, 0.9 * args.budget)):
                    print(f"{name}, {part}: not begun, {budget.left():.0f} s left; run again")
                    return
                names = args.contender or list(CONTENDERS)
                names = [n for n in names if part == "step" or n not in STEP_ONLY]
                made = measure(CASES[name], part, names, args.rounds, args.steps, budget)
                write_json(file, made)
                torch._dynamo.reset()
                free()
            print(table(json.loads(file.read_text())), flush=True)


if __name__ == "__main__":
    main()
