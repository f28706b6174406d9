"""Tiny Hugging Face models, and what a decoder must return: the same model in fp64 throughout."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

VOCABULARY = 61
#: Name -> (class prefix, changes of the configuration).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_every_head_its_own_kv": ("Llama", {"num_key_value_heads": 4}),
    "llama_one_kv_head": ("Llama", {"num_key_value_heads": 1}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_scaled_rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 3}),
}


def make(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random ...ForCausalLM with two layers; norms and biases are random as well."""
    prefix, own = FAMILIES[family]
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "attn_implementation": "sdpa",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = getattr(transformers, f"{prefix}Config")(**sizes | own | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    for p in model.parameters():
        if p.ndim == 1:
            nn.init.normal_(p, mean=1.0, std=0.3)
        else:
            nn.init.normal_(p, std=0.15)
    return cast(model, dtype)


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Parameters in dtype; buffers (rotary frequencies) as they are."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


def tokens(batch: int = 2, length: int = 9, seed: int = 1) -> Tensor:
    """The same on every device; they lie on the default one."""
    generator = torch.Generator("cpu").manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (batch, length), generator=generator, device="cpu")
    return ids.to(torch.get_default_device())


@dataclass
class Step:
    """One forward and backward."""

    loss: Tensor
    logits: Tensor
    gradients: dict[str, Tensor]
    #: sums of absolute addends of the biases' gradients, which cancel: k's are zero
    addends: dict[str, Tensor] = field(default_factory=dict)


def step(model: Any, ids: Tensor, labels: Tensor | None = None, **inputs: Any) -> Step:
    """Of a Hugging Face model or a Decoder."""
    if isinstance(model, transformers.PreTrainedModel):
        inputs["use_cache"] = False
    model.zero_grad()
    out = model(input_ids=ids, labels=ids if labels is None else labels, **inputs)
    out.loss.backward()
    return Step(out.loss.detach(), out.logits.detach(), gradients(model))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def exact(model: Any, ids: Tensor, labels: Tensor | None = None, **inputs: Any) -> Step:
    """``step`` of a copy in fp64; transformers' norms and loss would compute in fp32 there."""
    twin = cast(copy.deepcopy(model), torch.float64)
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "variance_epsilon"):
                norm = nn.RMSNorm(len(child.weight), eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    addends: dict[str, Tensor] = {}
    for name, module in twin.named_modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            _keep_addends(module, f"{name}.bias", addends)
    twin.zero_grad()
    logits = twin(input_ids=ids, use_cache=False, **inputs).logits
    targets = (ids if labels is None else labels)[:, 1:].flatten()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
    loss.backward()
    return Step(loss.detach(), logits.detach(), gradients(twin), addends)


def _keep_addends(module: nn.Module, name: str, found: dict[str, Tensor]) -> None:
    def keep(_: Any, __: Any, grad_output: tuple[Tensor, ...]) -> None:
        found[name] = grad_output[0].abs().flatten(0, -2).sum(0)

    module.register_full_backward_hook(keep)


class Launches(TorchDispatchMode):
    """Counts the codetta operators called inside the ``with`` block, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "codetta":
            self.count[func._schema.name.removeprefix("codetta::")] += 1
        return func(*args, **(kwargs or {}))
