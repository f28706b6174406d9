"""Seconds from process start to the end of the first training step, with cold and warm caches.

    python benchmarks/cold_start.py --out results             # cold, warm, cold in parallel
    python benchmarks/cold_start.py --out results --mode cold

A random Llama (16 layers, hidden 2048, MLP 8192, 16 heads, vocabulary 512) is trained for two steps
through ``codetta.nn.Decoder`` in a new process. 'cold' gives it empty cache directories for QuACK,
Triton, Inductor and codetta; 'warm' the directories that a cold process filled; 'parallel' is cold
with all GEMM kernels compiled at once before the step (``codetta.precompile``). The file system's
cache and the driver are warm in all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODES = ("cold", "warm", "parallel")
CACHES = ("QUACK_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CODETTA_CACHE_DIR")
SIZES = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 512,
}  # fmt: skip
TINY_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


# -------------------------------------------------------------------------------- the process
class Stages:
    """Seconds of each stage since the process began."""

    def __init__(self, begun: float) -> None:
        self.begun, self.last = begun, begun
        self.seconds: dict[str, float] = {}

    def done(self, name: str) -> None:
        now = time.time()
        self.seconds[name] = now - self.last
        self.last = now


def child(begun: float, sizes: dict[str, int], tokens: int, parallel: bool) -> dict[str, Any]:
    """Train two steps and say where the time went."""
    stages = Stages(begun)
    import torch
    from measure import device, environment, synchronize
    from transformers import LlamaConfig, LlamaForCausalLM

    stages.done("torch and transformers")
    import codetta.nn

    stages.done("codetta")
    torch.manual_seed(0)
    dtype = torch.bfloat16
    config = LlamaConfig(**sizes, max_position_embeddings=tokens, tie_word_embeddings=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device()):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(before)
    decoder = codetta.nn.Decoder.from_hf(model)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-5, fused=device() == "cuda")
    ids = torch.randint(0, sizes["vocab_size"], (1, tokens), device=device())
    synchronize()
    stages.done("model")
    decoder.schedules()
    stages.done("plans")
    builds = count_builds()
    found: dict[str, Any] = {"precompiled": None}
    if parallel:
        found["precompiled"] = precompiled(decoder, tokens)
        stages.done("precompile")
    for step in ("first step", "second step"):
        loss = decoder(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        stages.done(step)
    named = {"count": len(builds), "seconds": sum(builds)}
    ended = sum(s for n, s in stages.seconds.items() if n != "second step")
    return found | {
        "to_first_step_s": ended, "stages_s": stages.seconds, "kernel_builds": named,
        "loss": float(loss.detach()), "sizes": sizes, "tokens": tokens,
        "environment": environment(),
    }  # fmt: skip


def precompiled(decoder: Any, tokens: int) -> dict[str, Any]:
    """Compile the kernels of a step in worker processes; without a GPU only count them."""
    import codetta
    from codetta.tuning.calls import jobs
    from codetta.tuning.precompile import decoder_calls

    if decoder.lm_head.weight.is_cuda:
        made = codetta.precompile(decoder, tokens=tokens, progress=to_stderr)
        return {"kernels": made.kernels, "seconds": made.seconds, "failed": dict(made.failed)}
    return {"kernels": len(jobs(decoder_calls(decoder, tokens), None))}


def to_stderr(text: str, share: float) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def count_builds() -> list[float]:
    """Seconds of each QuACK kernel that is built or loaded from its cache, as they come."""
    seconds: list[float] = []
    try:
        from codetta.backends.cuda import quack
    except Exception:  # no fused backend here: nothing is built
        return seconds
    build = quack.build

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.monotonic()
        made = build(*args, **kwargs)  # raises while a worker is still compiling
        seconds.append(time.monotonic() - begun)
        return made

    quack.build = timed
    return seconds


# --------------------------------------------------------------------------------- the parent
def measured(mode: str, caches: Path, tiny: bool, tokens: int, limit: float) -> dict[str, Any]:
    """Run the process with its caches under ``caches``; what it reports."""
    own = {name: str(caches / name.lower()) for name in CACHES}
    command = [sys.executable, __file__, "--child", mode, "--tokens", str(tokens)]
    command += ["--tiny"] if tiny else []
    begun = time.time()
    environ = {**os.environ, **own, "CODETTA_BEGUN": repr(begun)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit)
    if done.returncode:
        raise RuntimeError(f"{mode}: the process failed\n{done.stdout}\n{done.stderr[-3000:]}")
    return {"mode": mode, **json.loads(done.stdout.splitlines()[-1])}


def describe(found: dict[str, Any]) -> str:
    parts = ", ".join(f"{n} {s:.1f}" for n, s in found["stages_s"].items())
    builds = found["kernel_builds"]
    return (
        f"{found['mode']:9} {found['to_first_step_s']:6.1f} s to the first step ({parts}); "
        f"{builds['count']} kernels built or loaded in {builds['seconds']:.1f} s"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--limit", type=float, default=240, help="seconds one process may take")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to test this script")
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        begun = float(os.environ["CODETTA_BEGUN"])
        sizes = TINY_SIZES if args.tiny else SIZES
        print(json.dumps(child(begun, sizes, args.tokens, args.child == "parallel")))
        return
    from measure import write_json

    found = []
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        for mode in args.mode or MODES:
            caches = Path(second if mode == "parallel" else first)
            if mode == "warm" and not any(caches.iterdir()):
                measured("cold", caches, args.tiny, args.tokens, args.limit)
            found.append(measured(mode, caches, args.tiny, args.tokens, args.limit))
            print(describe(found[-1]), flush=True)
            if args.out:
                write_json(args.out / "cold_start.json", {"runs": found})


if __name__ == "__main__":
    main()
