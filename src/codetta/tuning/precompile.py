"""``codetta.precompile``: all kernels of a decoder's training step, compiled at once.

Without it each kernel is compiled when it is first launched, one after the other. The step's calls
are recorded on tensors without memory, which launches nothing, and their kernels compiled by worker
processes (:mod:`codetta.tuning.workers`) into QuACK's cache, where the first step finds them. The
small Triton kernels beside them are compiled by the first step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codetta.backends.cuda.available import unavailable
from codetta.errors import BackendUnavailable
from codetta.language.types import Kind
from codetta.nn.block import ADJACENT, BACKWARD, ENTRY, EXIT, MIDDLE, Rules, Spec, head, segment
from codetta.nn.decoder import HEAD_RULES, Decoder
from codetta.nn.function import apply_plan
from codetta.nn.hf import layers_of
from codetta.plan import Plan
from codetta.tuning.calls import GemmCall, jobs, recorded
from codetta.tuning.tune import Progress
from codetta.tuning.workers import compile_all


@dataclass(frozen=True)
class Precompiled:
    """What was compiled.

    Attributes:
        kernels: GEMM kernels of the step, each counted once.
        seconds: of wall time.
        failed: the compiler's message by kernel, for those that the first step must try again.
    """

    kernels: int
    seconds: float
    failed: Mapping[str, str]

    def __str__(self) -> str:
        text = f"{self.kernels} kernels in {self.seconds:.1f} s"
        if not self.failed:
            return text
        return f"{text}, {len(self.failed)} failed: {next(iter(self.failed.values()))}"


def precompile(
    decoder: Decoder, *, tokens: int, workers: int = 0, progress: Progress | None = None
) -> Precompiled:
    """Compile the GEMM kernels of a training step in parallel, before the first one.

        decoder = codetta.nn.Decoder.from_hf(model)
        codetta.precompile(decoder, tokens=batch * length, progress=lambda text, share: print(text))

    Nothing is launched, and no process runs the caller's script again. What an earlier call has
    compiled costs its look-up.

    Args:
        tokens: M, tokens of a step; it decides tile configurations, and nothing else.
        workers: processes; as many as there are usable cores by default.
        progress: called with a line of text and the share that is done.

    Raises:
        BackendUnavailable: there is no GPU that the fused kernels run on.
    """
    device = decoder.lm_head.weight.device
    problem = unavailable(device if device.type == "cuda" else None)
    if problem is not None:
        raise BackendUnavailable(given="cuda", reason=problem[0], fix=problem[1])
    return compile_calls(
        decoder_calls(decoder, tokens), device.index, workers=workers, progress=progress
    )


def compile_calls(
    calls: Iterable[GemmCall],
    device: int | None,
    *,
    cache: Path | None = None,
    workers: int = 0,
    progress: Progress | None = None,
) -> Precompiled:
    """Compile the kernels of recorded calls into a folder, by default QuACK's."""
    if cache is None:
        from codetta.backends.cuda import quack

        cache = Path(quack.cache_folder())
    say = progress or (lambda text, share: None)
    begun, needed = time.monotonic(), jobs(calls, device)
    done = compile_all(
        needed,
        cache,
        workers=workers,
        done=lambda n, total: say(f"compiled {n} of {total} kernels", n / total),
    )
    failed = {k: s.error for k, s in done.items() if s.error}
    return Precompiled(len(needed), time.monotonic() - begun, failed)


# ------------------------------------------------------------------------------ what is called
def decoder_calls(decoder: Decoder, tokens: int) -> list[GemmCall]:
    """GEMM calls of a training step; which weights are frozen counts."""
    spec, found, seen = decoder.spec, [], set()
    reached = bool(decoder.model.embed_tokens.weight.requires_grad)
    for part, weights in _segments(decoder):
        trained = frozenset(n for n, w in weights.items() if w.requires_grad)
        dtype = next(iter(weights.values())).dtype
        wanted = trained | (frozenset(("x", "o", "r")) if reached else frozenset())
        if (part, wanted, dtype) not in seen:
            seen.add((part, wanted, dtype))
            if part == _HEAD:
                vocabulary = decoder.lm_head.out_features
                plan, rules = head(spec.hidden, vocabulary), HEAD_RULES
            else:
                plan, rules = segment(replace(spec, part=part), ADJACENT), BACKWARD
            found += plan_calls(plan, spec, tokens, dtype, wanted, rules)
        reached |= bool(trained)
    return found


_HEAD = "head"


def _segments(decoder: Decoder) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Parts of the decoder with their weights, in the order in which they run."""
    layers = layers_of(decoder)
    yield ENTRY, layers[0].attention_weights()
    for layer, following in pairwise(layers):
        yield MIDDLE, layer.mlp_weights() | following.attention_weights()
    yield EXIT, layers[-1].mlp_weights()
    yield _HEAD, {"norm": decoder.model.norm.weight, "head": decoder.lm_head.weight}


def plan_calls(
    plan: Plan,
    spec: Spec,
    tokens: int,
    dtype: torch.dtype,
    wanted: Iterable[str] | None = None,
    rules: Rules = BACKWARD,
    recompute: bool = True,
) -> list[GemmCall]:
    """GEMM calls of a Plan's forward and backward.

    Args:
        wanted: inputs with a gradient; all by default.
        recompute: as in :func:`codetta.plan.split`.
    """
    every = [i.name for i in plan.inputs if i.type.kind is not Kind.ROTARY and i.name != "is_qk"]
    asked = frozenset(every if wanted is None else wanted)
    given = {i.name: _input(i, spec, tokens, dtype, i.name in asked) for i in plan.inputs}

    def step() -> None:
        outputs = list(apply_plan(plan, given, rules, recompute).values())
        leaves = [given[name] for name in every if given[name].requires_grad]
        if leaves:
            torch.autograd.grad(outputs, leaves, [torch.empty_like(x) for x in outputs])

    return recorded(step)


def _input(i: Any, spec: Spec, tokens: int, dtype: torch.dtype, grad: bool) -> Any:
    t = i.type
    if t.kind is Kind.ROTARY:
        table = torch.empty(tokens, spec.rotary_dim, device="meta")
        return table, torch.empty(tokens, dtype=torch.int64, device="meta")
    shape = [tokens if t.rows == "M" else int(t.rows)] if t.has_rows else []
    shape += [int(t.cols)] if t.has_cols else []
    wide = torch.float32 if i.name == "r" else dtype  # a statistic
    return torch.empty(shape, dtype=wide, device="meta", requires_grad=grad)
