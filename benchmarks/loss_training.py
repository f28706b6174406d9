"""A pretrained model trained with the stock loss and with codetta.linear_cross_entropy, on a CPU.

SmolLM2-135M-Instruct is trained on source files of Python's standard library several times from
the same weights, on the same batches, each with AdamW over fp32 weights: Hugging Face as it is in
fp32 (the yardstick) and in bf16, and in bf16 with the head and its loss replaced: the model's last
hidden states go to ``codetta.linear_cross_entropy``, which never makes the logits. What is judged,
at every step, is the loss:

    |codetta - fp32| <= 2 |stock bf16 - fp32| + 0.01

    python benchmarks/loss_training.py --out benchmarks/results/DAY-cpu            # 200 steps
    python benchmarks/loss_training.py --out /tmp/t --random --steps 5             # seconds

Each run leaves a checkpoint every 20 steps in --work. A run that was cut off, or is to have more
steps, goes on from there, and its losses are the same bits as without the break. The optimizer
keeps fp32 weights; a model in bf16 has them rounded, as in the demo. `--run compiled` adds a run:
the whole model through ``codetta.compile(model, logits="none")``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measure import environment, lines, write_json
from torch import Tensor

from codetta.demo import models
from codetta.demo.text import batches, standard_library_text
from codetta.demo.train import _AdamW

CHECKPOINT_EVERY = 20
YARDSTICK, STOCK = "stock fp32", "stock bf16"
SLACK = 0.01


@dataclass(frozen=True)
class Settings:
    """What the losses are a function of."""

    steps: int
    batch: int
    seq_len: int
    lr: float
    seed: int
    random: bool


def stock_loss(model: Any) -> models.Loss:
    return models.hf_loss(model)


def codetta_loss(model: Any) -> models.Loss:
    """The stock body; head and loss in one, from its hidden states."""
    import codetta

    def loss(input_ids: Tensor) -> Tensor:
        x = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        found: Tensor = codetta.linear_cross_entropy(x, model.lm_head.weight, input_ids, shift=True)
        return found

    return loss


def compiled_loss(model: Any) -> models.Loss:
    """The whole model through CODA, its head fused with its loss."""
    import codetta

    return models.hf_loss(codetta.compile(model, logits="none"))


#: Name of a run -> (dtype of the model, what makes its loss).
RUNS: dict[str, tuple[torch.dtype, Callable[[Any], models.Loss]]] = {
    YARDSTICK: (torch.float32, stock_loss),
    STOCK: (torch.bfloat16, stock_loss),
    "codetta loss": (torch.bfloat16, codetta_loss),
    "compiled": (torch.bfloat16, compiled_loss),
}
ASKED_FOR = frozenset({"compiled"})


def train(
    name: str,
    source: models.Source,
    stretches: Sequence[Tensor],
    settings: Settings,
    checkpoint: Path,
    runs: Mapping[str, tuple[torch.dtype, Callable[[Any], models.Loss]]] = RUNS,
    stop_after: float = float("inf"),
) -> dict[str, Any]:
    """Losses and seconds of the steps of one run, from its checkpoint on if it has one.

    A checkpoint counts if it was made with the same settings on the same text; the number of steps
    may be another. It stops between two steps once ``stop_after`` (of ``time.monotonic``) has
    passed, with a checkpoint; then there are fewer losses than steps.
    """
    dtype, made = runs[name]
    model = models.copy_of(source.model, dtype, torch.device("cpu"))
    optimizer = _AdamW(model, settings.lr, dict(source.model.named_parameters()))
    key = _key(settings) | {"name": name}
    losses: list[float] = []
    seconds: list[float] = []
    if checkpoint.exists():
        kept = torch.load(checkpoint, weights_only=True)
        if kept["key"] == key and kept["seen"] == _digest(stretches[: len(kept["losses"])]):
            losses, seconds = kept["losses"], kept["seconds"]
            _restore(optimizer, kept)
        del kept
    loss_of = made(model)
    while len(losses) < settings.steps:
        begun = time.monotonic()
        loss = loss_of(stretches[len(losses)])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        del loss
        seconds.append(round(time.monotonic() - begun, 3))
        late = time.monotonic() > stop_after
        if len(losses) % CHECKPOINT_EVERY == 0 or len(losses) == settings.steps or late:
            seen = _digest(stretches[: len(losses)])
            kept = {"key": key, "seen": seen, "losses": losses, "seconds": seconds}
            _save(checkpoint, optimizer, kept)
            print(f"{name}: step {len(losses)}, loss {losses[-1]:.4f}", flush=True)
        if late:
            break
    return {"losses": losses[: settings.steps], "seconds": seconds[: settings.steps]}


def _save(file: Path, optimizer: _AdamW, record: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    weights = [w.detach() for w in optimizer.weights]
    torch.save(record | {"weights": weights, "adamw": optimizer.optimizer.state_dict()}, part)
    part.replace(file)


@torch.no_grad()
def _restore(optimizer: _AdamW, kept: Mapping[str, Any]) -> None:
    for weight, parameter, was in zip(
        optimizer.weights, optimizer.parameters, kept["weights"], strict=True
    ):
        weight.copy_(was)
        parameter.copy_(weight)
    optimizer.optimizer.load_state_dict(kept["adamw"])


# ---------------------------------------------------------------------------------- judgement
def judge(found: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """By run that is judged: its largest distance, share of what was allowed, steps over it."""
    result: dict[str, Any] = {}
    for name in found:
        if name in (YARDSTICK, STOCK):
            continue
        rows = [
            (abs(ours - exact), 2 * abs(stock - exact) + SLACK)
            for ours, stock, exact in zip(found[name], found[STOCK], found[YARDSTICK], strict=True)
        ]
        shares = [off / allowed if off == off else float("inf") for off, allowed in rows]
        result[name] = {
            "off_by_at_most": max(off for off, _ in rows),
            "mean_off_by": sum(off for off, _ in rows) / len(rows),
            "largest_share_of_allowed": max(shares),
            "steps_over": [i + 1 for i, share in enumerate(shares) if not share <= 1],
            "passed": all(share <= 1 for share in shares),
        }
    distances = [abs(s - e) for s, e in zip(found[STOCK], found[YARDSTICK], strict=True)]
    result["stock bf16 off by, mean and most"] = [sum(distances) / len(distances), max(distances)]
    return result


def report(record: Mapping[str, Any]) -> str:
    """The record as text: every step's losses, then the verdict."""
    runs = {n: r["losses"] for n, r in record["runs"].items()}
    judged = [n for n in runs if n not in (YARDSTICK, STOCK)]
    rows = [("step", *runs, *(f"{n}: off by" for n in judged), "allowed")]
    for i, exact in enumerate(runs[YARDSTICK]):
        off = [f"{abs(runs[n][i] - exact):.1e}" for n in judged]
        allowed = f"{2 * abs(runs[STOCK][i] - exact) + SLACK:.1e}"
        rows.append((str(i + 1), *(f"{losses[i]:.6f}" for losses in runs.values()), *off, allowed))
    s, e = record["settings"], record["environment"]
    verdicts = [
        f"{n}: {'passed' if v['passed'] else 'FAILED'} at {len(runs[n])} steps; off by "
        f"{v['off_by_at_most']:.2e} at most and {v['mean_off_by']:.2e} on average; at most "
        f"{v['largest_share_of_allowed']:.0%} of what is allowed; steps over it: {v['steps_over']}"
        for n, v in record["judged"].items()
        if n in judged
    ]
    mean, most = record["judged"]["stock bf16 off by, mean and most"]
    head = [
        f"$ {record['command']}",
        f"{record['model']}, {s['batch']} x {s['seq_len']} tokens a step, AdamW lr {s['lr']}, "
        f"seed {s['seed']}; text sha256 {record['text_sha256'][:16]}",
        f"torch {e['torch']}, transformers {e['transformers']}, Python {e['python']}, "
        f"{record['cpu']}, {record['threads']} thread(s); {e['date']}, commit {e['commit']}",
        "|codetta - fp32| <= 2 |stock bf16 - fp32| + 0.01 at each step:",
        *verdicts,
        f"stock bf16 itself: off by {most:.2e} at most and {mean:.2e} on average",
    ]
    return "\n".join([*head, "", lines(rows)]) + "\n"


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown CPU"
    names = [x.split(":", 1)[1].strip() for x in text.splitlines() if x.startswith("model name")]
    return names[0] if names else "unknown CPU"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", action="append", choices=list(RUNS), help="all but compiled")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, help="1e-5, 1e-3 with --random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random", action="store_true", help="a small random Llama")
    parser.add_argument("--work", type=Path, help="where checkpoints are kept until the end")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds to stop after")
    args = parser.parse_args(arguments)
    lr = args.lr or (1e-3 if args.random else 1e-5)
    settings = Settings(args.steps, args.batch, args.seq_len, lr, args.seed, args.random)
    work = args.work or Path(tempfile.gettempdir()) / f"codetta-loss-training-{os.getuid()}"
    source = models.small_random(args.seed) if args.random else models.pretrained(print)
    text = standard_library_text()
    stretches = batches(
        text, source.encode,
        distinct=args.steps, batch=args.batch, seq_len=args.seq_len, seed=args.seed,
    )  # fmt: skip
    end = time.monotonic() + args.budget
    found: dict[str, Any] = {}
    for name in args.run or [n for n in RUNS if n not in ASKED_FOR]:
        file = work / f"{name.replace(' ', '_')}_{_digest(_key(settings))}.pt"
        found[name] = train(name, source, stretches, settings, file, stop_after=end)
        if len(found[name]["losses"]) < args.steps:
            print(f"{name}: stopped; run the same command again to go on")
            return 2
    if not {YARDSTICK, STOCK} <= set(found):
        return 0  # its losses wait in the checkpoint
    record = {
        "command": "python benchmarks/loss_training.py " + " ".join(arguments or sys.argv[1:]),
        "model": source.name, "parameters": source.parameters, "settings": asdict(settings),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "environment": environment(), "cpu": _cpu(), "threads": torch.get_num_threads(),
        "judged": judge({n: r["losses"] for n, r in found.items()}), "runs": found,
    }  # fmt: skip
    write_json(args.out / "loss_training.json", record)
    (args.out / "loss_training.txt").write_text(report(record))
    print(report(record).split("\n\n")[0])
    return int(not all(v["passed"] for v in record["judged"].values() if isinstance(v, dict)))


def _key(settings: Settings) -> dict[str, Any]:
    """What a run depends on up to any step."""
    found = asdict(settings)
    del found["steps"]
    return found


def _digest(x: Any) -> str:
    if isinstance(x, Sequence):
        x = [t.tolist() for t in x]
    return hashlib.sha256(repr(x).encode()).hexdigest()[:10]


if __name__ == "__main__":
    sys.exit(main())
