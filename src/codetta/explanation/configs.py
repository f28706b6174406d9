"""Models by name, path or config, on the meta device: shapes without weights.

Shorthands are the numbers of published configurations (config.json of meta-llama/Llama-3.2-1B,
meta-llama/Llama-3.1-8B, Qwen/Qwen3-0.6B and HuggingFaceTB/SmolLM2-135M on the Hugging Face Hub).

A model of many equal layers is looked at with a few of them, once with n and once with n + 1: what
one more layer adds, every further layer adds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from codetta.capture.compile import compile
from codetta.errors import MissingPackage, UnknownModel
from codetta.explanation.facts import Explanation, LeftFact, RegionFact
from codetta.explanation.record import explain, label

_LLAMA_1B = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
SHORTHANDS: dict[str, dict[str, Any]] = {
    "llama-1b": _LLAMA_1B,
    "llama-8b": _LLAMA_1B | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "head_dim": 128, "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 49152, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
}  # fmt: skip


def explain_model(
    name: str,
    *,
    tokens: int,
    batch: int,
    dtype: torch.dtype,
    layers: int | None,
    logits: str = "keep",
    pack: bool = False,
) -> Explanation:
    """Explain the training step of a named model on ``batch`` rows of ``tokens`` tokens.

    ``layers``: how many are traced; the rest is counted like them. None traces all. ``logits``
    and ``pack``: as in :func:`codetta.compile`.

    Raises:
        UnknownModel: it is none of the shorthands and transformers cannot load its config.
    """
    config = configuration(name)
    text = config.get_text_config()
    has = int(text.num_hidden_layers)
    size = (batch, tokens)
    if layers is None or layers + 1 >= has:
        return replace(_explained(config, has, size, dtype, logits, pack), model=name)
    less, more = (_explained(config, n, size, dtype, logits, pack) for n in (layers, layers + 1))
    return replace(extrapolated(less, more, layers, has), model=name)


def configuration(name: str) -> Any:
    """A Hugging Face config: of a shorthand, a config.json, a folder, or a model on the Hub."""
    path = Path(name).expanduser()
    looks_like_path = name.endswith(".json") or name.startswith((".", "/", "~"))
    if looks_like_path and not path.exists():
        raise UnknownModel(given=name, reason="there is no such file", known=", ".join(SHORTHANDS))
    try:
        import transformers
    except ImportError as error:
        raise MissingPackage(
            what="codetta explain MODEL",
            package="transformers",
            given="not installed",
            fix="pip install 'codetta[hf]'",
        ) from error
    try:
        if name.lower() in SHORTHANDS:
            return transformers.AutoConfig.for_model(**SHORTHANDS[name.lower()])
        return transformers.AutoConfig.from_pretrained(str(path) if path.exists() else name)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UnknownModel(given=name, reason=reason, known=", ".join(SHORTHANDS)) from error


def on_meta(config: Any, layers: int, dtype: torch.dtype) -> nn.Module:
    """The model of a config with so many layers, without memory."""
    import transformers

    config = type(config).from_dict(config.to_dict())
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types)[:layers]
    named = (config.architectures or [""])[0]
    cls = getattr(transformers, named, None)
    with torch.device("meta"):
        if cls is not None and hasattr(cls, "_from_config"):
            model = cls._from_config(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
        made: nn.Module = model.to(dtype).train()
    return made


def _explained(
    config: Any,
    layers: int,
    size: tuple[int, int],
    dtype: torch.dtype,
    logits: str = "keep",
    pack: bool = False,
) -> Explanation:
    model = compile(on_meta(config, layers, dtype), logits=logits, pack=pack)
    ids = torch.zeros(size, dtype=torch.long, device="meta")
    cache = {"use_cache": False} if getattr(config, "use_cache", None) is not None else {}
    return replace(explain(model, input_ids=ids, labels=ids, **cache), layers=layers)


def extrapolated(less: Explanation, more: Explanation, traced: int, layers: int) -> Explanation:
    """The model with ``layers`` layers, from two with ``traced`` and one more."""
    steps = layers - traced - 1
    had = {r.key: r for r in less.regions}
    regions = [_further(had.get(r.key), r, steps) for r in more.regions]
    found = {x.key: x.count for x in less.left}
    left = [_more(found.get(x.key, 0), x, steps) for x in more.left]
    return replace(
        more,
        regions=tuple(regions),
        left=tuple(left),
        notes=tuple(f"{n} (in the {traced + 1} layers traced)" for n in more.notes),
        layers=layers,
        traced_layers=traced + 1,
    )


def _further(before: RegionFact | None, region: RegionFact, steps: int) -> RegionFact:
    count = region.count + steps * (region.count - (before.count if before else 0))
    first = region.first
    moved = before is not None and before.first != first and before.count == region.count
    if moved and first is not None:  # it is in the last layer, wherever that is
        first += steps
    shifted = replace(region, count=count, first=first)
    if moved:
        modules = tuple(_shifted(m, steps) for m in region.modules)
        shifted = replace(shifted, modules=modules)
    return replace(shifted, label=label(shifted))


def _more(before: int, left: LeftFact, steps: int) -> LeftFact:
    return replace(left, count=left.count + steps * (left.count - before))


def _shifted(path: str, steps: int) -> str:
    return ".".join(str(int(p) + steps) if p.isdigit() else p for p in path.split("."))
