"""One decoder layer on a GPU: CODA beside eager, torch.compile, Liger and the floor.

The layer runs from attention output to the next layer's q, k, v (attention itself excluded):
output projection, residual, RMSNorm, SwiGLU MLP, residual, RMSNorm, q k v projections, rotary
embedding; forward, and backward with gradients of every weight. The floor is its twelve plain GEMMs
(cuBLAS), which every contender must do.

    python benchmarks/layer.py --out results            # all shapes, resumed where it stopped
    python benchmarks/layer.py --out results --shape d2048 --rounds 30

All contenders run interleaved in one process on random data, forward and forward + backward timed
by CUDA events; ratios are medians of per-round ratios, with a 95 % bootstrap interval. CODA's time
includes weight folds and packing, finalizers and RoPE's backward. One JSON file per shape; a shape
whose file exists is skipped.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TOKENS = 16384
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer: hidden d, MLP width f, query and key-value heads."""

    name: str
    d: int
    f: int
    heads: int
    kv_heads: int

    @property
    def head_dim(self) -> int:
        return self.d // self.heads

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


SHAPES = [
    Shape("d2048", 2048, 8192, 16, 16),
    Shape("d4096", 4096, 14336, 32, 8),
    Shape("d8192", 8192, 28672, 64, 8),
    Shape("paper2048", 2048, 5632, 16, 16),
    Shape("paper4096", 4096, 11008, 32, 32),
    Shape("paper8192", 8192, 22016, 64, 64),
]


@dataclass
class Layer:
    """Weights and inputs of one layer, on the GPU in bf16."""

    shape: Shape
    weights: dict[str, Tensor]
    o: Tensor
    x: Tensor
    cos: Tensor
    sin: Tensor
    grad_x: Tensor
    grad_qkv: Tensor

    @staticmethod
    def random(s: Shape, tokens: int, seed: int = 0) -> Layer:
        torch.manual_seed(seed)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*size, device="cuda") * scale).to(torch.bfloat16)

        sizes = {
            "wo": (s.d, s.d), "wg": (s.f, s.d), "wu": (s.f, s.d), "wd": (s.d, s.f),
            "wq": (s.heads * s.head_dim, s.d), "wk": (s.kv_heads * s.head_dim, s.d),
            "wv": (s.kv_heads * s.head_dim, s.d),
        }  # fmt: skip
        weights = {n: normal(*size, scale=size[1] ** -0.5) for n, size in sizes.items()}
        weights |= {n: 1.0 + normal(s.d, scale=0.1) for n in ("norm_mlp", "norm_attn")}
        for w in weights.values():
            w.requires_grad_()
        angles = torch.outer(
            torch.arange(tokens, device="cuda", dtype=torch.float32),
            10000.0 ** (-torch.arange(0, s.head_dim, 2, device="cuda") / s.head_dim),
        )
        return Layer(
            s,
            weights,
            normal(tokens, s.d).requires_grad_(),
            normal(tokens, s.d).requires_grad_(),
            angles.cos(),
            angles.sin(),
            normal(tokens, s.d),
            normal(tokens, s.qkv),
        )

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.weights.values(), self.o, self.x]


# ------------------------------------------------------------------------------ contenders
def plain_layer(layer: Layer, norm: Any, gate: Any, rotary: Any) -> tuple[Tensor, Tensor]:
    """The layer as PyTorch code; norm(x, w), gate(g, u) and rotary(q, k) are exchangeable."""
    w, s = layer.weights, layer.shape
    x = layer.x + F.linear(layer.o, w["wo"])
    h = norm(x, w["norm_mlp"])
    x = x + F.linear(gate(F.linear(h, w["wg"]), F.linear(h, w["wu"])), w["wd"])
    h = norm(x, w["norm_attn"])
    q, k, v = (F.linear(h, w[n]) for n in ("wq", "wk", "wv"))
    q, k = (t.view(1, -1, n, s.head_dim) for t, n in ((q, s.heads), (k, s.kv_heads)))
    q, k = rotary(q, k)
    return x, torch.cat((q.reshape(len(x), -1), k.reshape(len(x), -1), v), dim=1)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def silu_gate(g: Tensor, u: Tensor) -> Tensor:
    return F.silu(g) * u


def rotate_half(layer: Layer) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    cos = torch.cat((layer.cos, layer.cos), -1)[None, :, None].to(torch.bfloat16)
    sin = torch.cat((layer.sin, layer.sin), -1)[None, :, None].to(torch.bfloat16)

    def turned(t: Tensor) -> Tensor:
        a, b = t.chunk(2, dim=-1)
        return t * cos + torch.cat((-b, a), dim=-1) * sin

    return lambda q, k: (turned(q), turned(k))


def eager(layer: Layer) -> Callable[[], tuple[Tensor, Tensor]]:
    rotary = rotate_half(layer)
    return lambda: plain_layer(layer, rms_norm, silu_gate, rotary)


def compiled(layer: Layer, mode: str = "default") -> Callable[[], tuple[Tensor, Tensor]]:
    return torch.compile(eager(layer), fullgraph=True, dynamic=False, mode=mode)


def liger(layer: Layer) -> Callable[[], tuple[Tensor, Tensor]]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    cos = torch.cat((layer.cos, layer.cos), -1)[None].to(torch.bfloat16)
    sin = torch.cat((layer.sin, layer.sin), -1)[None].to(torch.bfloat16)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)

    def rotary(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    return lambda: plain_layer(layer, norm, LigerSiLUMulFunction.apply, rotary)


def coda(layer: Layer) -> Callable[[], tuple[Tensor, Tensor]]:
    from codetta.nn.block import ADJACENT, MIDDLE, Spec, segment
    from codetta.nn.function import apply_plan

    s = layer.shape
    spec = Spec(MIDDLE, s.d, s.f, s.heads, s.kv_heads, s.head_dim, s.head_dim, EPS, EPS)
    plan = segment(spec, ADJACENT)
    rope = (torch.cat((layer.cos, layer.sin), dim=1), torch.arange(len(layer.x), device="cuda"))
    given = {**layer.weights, "x": layer.x, "o": layer.o, "rope": rope}

    def run() -> tuple[Tensor, Tensor]:
        out = apply_plan(plan, {i.name: given[i.name] for i in plan.inputs})
        return out["x_out"], out["qkv"]

    return run


CONTENDERS: dict[str, Callable[[Layer], Callable[[], tuple[Tensor, Tensor]]]] = {
    "eager": eager, "torch.compile": compiled, "liger": liger, "coda": coda,
}  # fmt: skip


def floor(layer: Layer) -> tuple[Callable[[], None], Callable[[], None]]:
    """The plain GEMMs of the forward (4) and of forward + backward (12)."""
    s, w = layer.shape, {n: t.detach() for n, t in layer.weights.items()}
    up, qkv = torch.cat((w["wg"], w["wu"])), torch.cat((w["wq"], w["wk"], w["wv"]))
    x, o = layer.x.detach(), layer.o.detach()
    y = torch.randn(len(x), s.f, device="cuda", dtype=torch.bfloat16)
    dz = torch.randn(len(x), 2 * s.f, device="cuda", dtype=torch.bfloat16)
    weights = [(o, w["wo"]), (x, up), (y, w["wd"]), (x, qkv)]
    grads = [layer.grad_x, dz, layer.grad_x, layer.grad_qkv]

    def forward() -> None:
        for a, b in weights:
            a @ b.t()

    def both() -> None:
        forward()
        for (a, b), g in zip(weights, grads, strict=True):
            g @ b
            g.t() @ a

    return forward, both


# ------------------------------------------------------------------------------ measurement
def timed(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def steps(layer: Layer, forward: Callable[[], tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Functions to time: the forward with graph, and forward + backward."""

    def both() -> None:
        outputs = forward()
        torch.autograd.grad(outputs, layer.leaves, (layer.grad_x, layer.grad_qkv))

    return {"forward": forward, "both": both}


def measure(shape: Shape, tokens: int, rounds: int, names: list[str]) -> dict[str, Any]:
    """Interleaved timings of all contenders at one shape."""
    layer = Layer.random(shape, tokens)
    base, base_both = floor(layer)
    runs: dict[str, dict[str, Any]] = {"floor": {"forward": base, "both": base_both}}
    notes: dict[str, str] = {}
    memory: dict[str, int] = {}
    errors: dict[str, dict[str, float]] = {}
    reference = gradients(layer, eager(layer))
    for name in names:
        try:
            step = steps(layer, CONTENDERS[name](layer))
            start = time.time()
            found = gradients(layer, step["forward"])
            notes[name] = f"first call {time.time() - start:.1f} s"
            errors[name] = {k: relative(found[k], reference[k]) for k in found}
            memory[name] = peak(step["both"])
            runs[name] = step
        except Exception as error:
            notes[name] = f"failed: {type(error).__name__}: {str(error)[:300]}"
    times: dict[str, dict[str, list[float]]] = {n: {"forward": [], "both": []} for n in runs}
    for i in range(rounds + 2):
        order = list(runs)
        random.Random(i).shuffle(order)
        for name in order:
            for what, run in runs[name].items():
                elapsed = timed(run)
                if i >= 2:
                    times[name][what].append(elapsed)
    return {
        "shape": asdict(shape), "tokens": tokens, "rounds": rounds, "times_ms": times,
        "peak_bytes": memory, "relative_difference_to_eager": errors, "notes": notes,
        "environment": environment(),
    }  # fmt: skip


def gradients(layer: Layer, forward: Callable[[], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    outputs = forward()
    found = torch.autograd.grad(outputs, layer.leaves, (layer.grad_x, layer.grad_qkv))
    names = [*(f"d_{n}" for n in layer.weights), "d_o", "d_x"]
    named = dict(zip(names, found, strict=True))
    return {"x": outputs[0].detach()} | named


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def peak(run: Callable[[], Any]) -> int:
    """Peak memory of a step above what is allocated before it, in bytes."""
    run()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def environment() -> dict[str, str]:
    def output(*command: str) -> str:
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=20
            ).stdout.strip()
        except OSError:
            return ""

    query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw"
    return {
        "gpu": output("nvidia-smi", query, "--format=csv,noheader"),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": output("git", "rev-parse", "HEAD"),
    }


# ---------------------------------------------------------------------------------- report
def ratio(times: list[float], base: list[float]) -> tuple[float, float, float]:
    """Median of per-round ratios with a 95 % bootstrap interval."""
    ratios = [t / b for t, b in zip(times, base, strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(1000))
    return statistics.median(ratios), medians[25], medians[974]


def table(result: dict[str, Any]) -> str:
    times = result["times_ms"]
    lines = [f"{result['shape']['name']}  M {result['tokens']}  {result['environment']['gpu']}"]
    lines.append(f"{'':16}{'forward':>30}{'forward + backward':>34}{'peak GiB':>10}")
    for name, found in times.items():
        cells = []
        for what in ("forward", "both"):
            mid, low, high = ratio(found[what], times["floor"][what])
            ms = statistics.median(found[what])
            cells.append(f"{ms:9.3f} ms {mid:.3f} [{low:.3f}, {high:.3f}]")
        memory = result["peak_bytes"].get(name, 0) / 2**30
        lines.append(f"{name:16}{cells[0]:>30}{cells[1]:>34}{memory:10.2f}")
    lines += [f"  {n}: {note}" for n, note in result["notes"].items() if "failed" in note]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", action="append", choices=[s.name for s in SHAPES])
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES:
        if args.shape and shape.name not in args.shape:
            continue
        file = args.out / f"layer_{shape.name}_{args.tokens}.json"
        if not file.exists():
            names = args.contender or list(CONTENDERS)
            file.write_text(json.dumps(measure(shape, args.tokens, args.rounds, names), indent=1))
            torch.cuda.empty_cache()
        print(table(json.loads(file.read_text())), flush=True)


if __name__ == "__main__":
    main()
