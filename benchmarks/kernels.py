"""Each kernel of a decoder layer beside what bounds it.

A GEMM with its epilogue is measured against its own plain GEMM, best of cuBLAS and QuACK's mainloop
in its best tile; a finalizer, weight preparation, the rotary backward and whatever else moves
memory against its bytes over the bandwidth of a large copy in the same run.

    python benchmarks/kernels.py --out results          # all shapes, resumed where it stopped
    python benchmarks/kernels.py --out results --shape d2048

The kernels are the calls that one forward and backward of the layer really make, recorded with
their tensors (random data) by a dispatch mode. Each contender's calls are captured in a CUDA graph,
so that launches cost nothing, on copies of the inputs that rotate through at least twice the L2
cache; contenders interleaved; median of per-round ratios with a 95 % bootstrap interval. One JSON
file per shape; a shape whose file exists is skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import contenders
import torch
from layer_model import SHAPES, TINY, TOKENS, Layer, Shape
from measure import (
    Budget,
    device,
    environment,
    free,
    gpu_state,
    interleaved,
    lines,
    ratio,
    timed,
    write_json,
)
from recorder import Call, record
from torch import Tensor

SAMPLE_MS = 2.0
MOST_CALLS = 128
#: Copies of a kernel's inputs take at most this many bytes.
MOST_BYTES = 8 << 30
NEEDED = 120


def measure(shape: Shape, tokens: int, rounds: int, budget: Budget) -> dict[str, Any]:
    """All kernels of the layer at one shape."""
    layer = Layer.random(shape, tokens)
    calls = recorded(layer)
    result: dict[str, Any] = {
        "shape": asdict(shape), "tokens": tokens, "environment": environment(),
        "copy_bytes_per_s": copy_bandwidth(), "gemms": [], "memory": [],
    }  # fmt: skip
    for count, call in enumerate(calls):
        each = Budget(max(budget.left(), 0.0) / (len(calls) - count))
        if call.op == "codetta::gemm":
            result["gemms"].append(gemm_record(call, shape, rounds, each))
        else:
            result["memory"].append(memory_record(call, rounds, each))
        free()
    result["environment"]["state_after"] = gpu_state()
    return result


def recorded(layer: Layer) -> list[Call]:
    """The calls of one step, kernels compiled beforehand, in order; with the phase of each."""
    contender = contenders.coda(layer)
    contender.both()
    contender.clear()
    forward, outputs = record(contender.forward)
    with torch.autograd.set_multithreading_enabled(False):  # in the thread that records
        backward, _ = record(lambda: torch.autograd.backward(outputs, contender.cotangents))
    contender.clear()
    for calls, phase in ((forward, "forward"), (backward, "backward")):
        for call in calls:
            call.phase = phase
    products = sum(c.op == "codetta::gemm" for c in [*forward, *backward])
    assert products >= 12, f"recorded {products} of the layer's twelve products"
    return [*forward, *backward]


# -------------------------------------------------------------------------------------- GEMMs
def gemm_record(call: Call, shape: Shape, rounds: int, budget: Budget) -> dict[str, Any]:
    a, b = call.tensors[:2]
    (m, k), n = a.shape, b.shape[1]
    rivals: dict[str, Callable[..., Any]] = {"cublas": torch.matmul}
    notes: dict[str, str] = {}
    try:
        from plain import plain

        if not a.is_cuda:
            raise RuntimeError("there is no GPU")
        plain(a, b)  # compiles
        rivals["quack"] = plain
    except Exception as error:
        notes["quack"] = f"failed: {type(error).__name__}: {str(error)[:200]}"
    runs = {"coda": batch(call.again, call.tensors, call.written, notes, "coda")}
    for name, product in rivals.items():
        runs[name] = batch(product, [a, b], m * n * a.element_size(), notes, name)
    times = per_call(runs, rounds, budget)
    return {
        "role": role(shape, call.phase, m, n, k, major(a)), "program": call.name, "mnk": [m, n, k],
        "majors": [major(a), major(b)], "times_ms": times, "notes": notes,
    }  # fmt: skip


def role(s: Shape, phase: str, m: int, n: int, k: int, major_a: str) -> str:
    """What a product is in the layer, from its sizes; a wgrad reads its activations transposed."""
    kinds = {s.qkv: "q k v", 2 * s.f: "gate and up", s.f: "down", s.d: "output"}
    if phase == "forward":
        return f"{'down' if k == s.f else kinds.get(n, '?')} projection"
    if major_a == "row":
        return f"{'down' if n == s.f else kinds.get(k, '?')} dgrad"
    return f"{'down' if n == s.f else kinds.get(m, '?')} wgrad"


def major(x: Tensor) -> str:
    return "row" if x.stride(-1) == 1 else "column"


# ------------------------------------------------------------------------------ memory traffic
def memory_record(call: Call, rounds: int, budget: Budget) -> dict[str, Any]:
    notes: dict[str, str] = {}
    runs = {"coda": batch(call.again, call.tensors, call.written, notes, "coda")}
    return {
        "kind": call.op, "name": call.name, "phase": call.phase,
        "bytes": size(call.tensors) + call.written,
        "times_ms": per_call(runs, rounds, budget), "notes": notes,
    }  # fmt: skip


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy."""
    count = 1 << 30 if torch.cuda.is_available() else 1 << 24
    x = torch.randint(0, 255, (count,), dtype=torch.uint8, device=device())
    y = torch.empty_like(x)
    found = [timed(lambda: y.copy_(x), 3) for _ in range(7)]
    return 2 * count / (statistics.median(found) * 1e-3)


# ------------------------------------------------------------------------------------- running
@dataclass(frozen=True)
class Batch:
    """Several calls on rotating inputs, run as one."""

    run: Callable[[], Any]
    calls: int


def batch(
    function: Callable[..., Any],
    given: list[Tensor],
    written: int,
    notes: dict[str, str],
    name: str,
) -> Batch:
    """Calls of ``function`` on copies of ``given``, in one CUDA graph where there is a GPU."""
    total = max(size(given) + written, 1)
    wanted = math.ceil(2 * l2_bytes() / total)
    copies = max(1, min(wanted, MOST_CALLS, MOST_BYTES // total))
    sets = [given, *([copied(x) for x in given] for _ in range(copies - 1))]
    for arrays in sets:  # whatever is made once per tensor must exist before a capture
        function(*arrays)
    once = min(timed(lambda: function(*given)) for _ in range(3))
    calls = min(max(copies, math.ceil(SAMPLE_MS / max(once, 1e-3))), MOST_CALLS)
    turns = [sets[i % copies] for i in range(calls)]

    def everything() -> None:
        for arrays in turns:
            function(*arrays)

    if not torch.cuda.is_available():
        return Batch(everything, calls)
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            everything()
        return Batch(graph.replay, calls)
    except Exception as error:
        notes[name] = f"no graph, launches included: {type(error).__name__}: {str(error)[:200]}"
        torch.cuda.synchronize()
        return Batch(everything, calls)


def per_call(batches: dict[str, Batch], rounds: int, budget: Budget) -> dict[str, list[float]]:
    """Milliseconds per call, interleaved."""
    times = interleaved({n: (b.run, 1) for n, b in batches.items()}, rounds, budget)
    return {n: [t / batches[n].calls for t in found] for n, found in times.items()}


def copied(x: Tensor) -> Tensor:
    """The values of x in other memory, with its strides."""
    if 0 in x.stride():
        return x.clone()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def size(tensors: list[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def l2_bytes() -> int:
    if not torch.cuda.is_available():
        return 1 << 16
    return int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 50 << 20))


# -------------------------------------------------------------------------------------- report
def best_plain(times: dict[str, list[float]]) -> str:
    """The faster of the plain GEMMs by median."""
    rivals = [n for n in times if n != "coda"]
    return min(rivals, key=lambda n: statistics.median(times[n]))


def gemm_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for g in result["gemms"]:
        times = g["times_ms"]
        best = best_plain(times)
        ms = {n: statistics.median(t) for n, t in times.items()}
        found.append(g | {"ms": ms, "best": best, "ratio": ratio(times["coda"], times[best])})
    return found


def memory_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for m in result["memory"]:
        floor_ms = m["bytes"] / result["copy_bytes_per_s"] * 1e3
        ms = statistics.median(m["times_ms"]["coda"])
        found.append(m | {"ms": ms, "floor_ms": floor_ms, "ratio": ms / floor_ms})
    return found


def table(result: dict[str, Any]) -> str:
    e = result["environment"]
    rows = [("GEMM", "M N K", "coda ms", "cublas", "quack", "coda / best plain")]
    for g in gemm_rows(result):
        mid, low, high = g["ratio"]
        ms = [f"{g['ms'][n]:.4f}" if n in g["ms"] else "" for n in ("coda", "cublas", "quack")]
        rows.append((g["role"], str(g["mnk"]), *ms, f"{mid:.3f} [{low:.3f}, {high:.3f}]"))
    moved = [("memory", "MB", "ms", "floor ms", "ratio")]
    for m in memory_rows(result):
        cells = (f"{m['bytes'] / 1e6:.2f}", f"{m['ms']:.4f}", f"{m['floor_ms']:.4f}")
        moved.append((m["name"], *cells, f"{m['ratio']:.2f}"))
    notes = {n for x in (*result["gemms"], *result["memory"]) for n in x["notes"].values()}
    head = f"{result['shape']['name']}  M {result['tokens']}  {e['gpu']}  copy "
    head += f"{result['copy_bytes_per_s'] / 1e12:.2f} TB/s"
    return "\n".join([head, lines(rows), lines(moved), *sorted(notes)])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", action="append", choices=[s.name for s in [*SHAPES, TINY]])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=540, help="seconds after which to stop")
    args = parser.parse_args(arguments)
    budget = Budget(args.budget)
    shapes = {s.name: s for s in [*SHAPES, TINY]}
    for name in args.shape or [s.name for s in SHAPES]:
        file = args.out / f"kernels_{name}_{args.tokens}.json"
        if not file.exists():
            if budget.left() < min(NEEDED, 0.9 * args.budget):
                print(f"{name}: not begun, {budget.left():.0f} s left; run again to go on")
                break
            write_json(file, measure(shapes[name], args.tokens, args.rounds, budget))
            free()
        print(table(json.loads(file.read_text())), flush=True)


if __name__ == "__main__":
    main()
