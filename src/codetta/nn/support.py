"""What a Decoder refuses, so that it never computes something else than the model would.

A Decoder reads weights and sizes and computes what transformers' own classes define. Whatever
changes a module's computation without changing its weights (a subclass, a hook, a replaced
``forward``, an adapter, a quantized or sharded weight) would be bypassed, so it is an error. The
check runs at every call, since any of these can happen after the Decoder was made; it looks at
types and attributes only, some 50 microseconds a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from codetta.errors import UnsupportedModel

#: Model types whose layer is x + Wo attention(norm(x)), x + Wd (silu(Wg norm(x)) * Wu norm(x)).
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
ATTENTION = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj"}
MLP = {"wg": "gate_proj", "wu": "up_proj", "wd": "down_proj"}
_LINEAR = frozenset((*ATTENTION.values(), "o_proj", *MLP.values(), "lm_head"))
_SILU = ("SiLU", "SiLUActivation")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def unsupported(reason: str, fix: str) -> UnsupportedModel:
    return UnsupportedModel(reason=reason, fix=fix)


def check_model(model: Any) -> None:
    """The whole model: its type, and that it is transformers' own class without wrappers."""
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in SUPPORTED or not hasattr(model, "model") or not hasattr(model, "lm_head"):
        raise unsupported(
            f"it is a {type(model).__name__} of type {kind!r}",
            f"Give a ...ForCausalLM of type {', '.join(SUPPORTED)}.",
        )
    try:
        _check_module("", model)
    except _Unfit as unfit:
        raise unsupported(f"it{unfit.reason}", unfit.fix) from None


def check_config(config: Any) -> None:
    """Attention as the layers' formula has it."""
    window = getattr(config, "sliding_window", None)
    if window is not None:
        raise unsupported(
            f"it attends to a sliding window of {window} tokens",
            "If no sequence is longer than that, load it with sliding_window=None.",
        )
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        raise unsupported(
            f"its layers attend differently: {sorted(set(config.layer_types))}",
            "Load it with layer_types all 'full_attention' if that is what you want.",
        )


def check_modules(backbone: Any, head: Any, layers: list[Any]) -> None:
    """Each module transformers' own or a plain nn.Linear; one dtype and device throughout."""
    if not layers:
        raise unsupported("it has no layers", "Give a model with at least one.")
    embedding = backbone.embed_tokens.weight
    if embedding.dtype not in _DTYPES:
        raise unsupported(
            f"its weights are {embedding.dtype}",
            f"Convert them to one of {', '.join(map(str, _DTYPES))}.",
        )
    for where, name, module in _modules(backbone, head, layers):
        try:
            _check_module(name, module)
            for which, w in module._parameters.items():
                if w is not None:
                    _check_weight(which, w, embedding)
        except _Unfit as unfit:
            path = ".".join(str(part) for part in (*where, name))
            raise unsupported(f"{path}{unfit.reason}", unfit.fix) from None
    if head.bias is not None:
        raise unsupported("its head has a bias", "Set model.lm_head.bias = None if it is zero.")


class _Unfit(Exception):
    """A reason that goes on where the module's path, spelled out only for a message, ends."""

    def __init__(self, reason: str, fix: str) -> None:
        self.reason, self.fix = reason, fix


def _modules(
    backbone: Any, head: Any, layers: list[Any]
) -> Iterator[tuple[tuple[str | int, ...], str, nn.Module]]:
    """(path, name, module) of all whose formula the Decoder takes over."""
    yield (), "model", backbone
    yield ("model",), "norm", backbone.norm
    yield (), "lm_head", head
    for i, layer in enumerate(layers):
        yield ("model", "layers"), str(i), layer
        for name, module in layer._modules.items():
            yield ("model", "layers", i), name, module
            for inner, part in module._modules.items():
                yield ("model", "layers", i, name), inner, part


def _check_module(name: str, module: nn.Module) -> None:
    """It computes what its class says, and its class is the expected one."""
    kind = type(module)
    if name in _LINEAR:
        if kind is not nn.Linear:
            raise _Unfit(
                f" is a {kind.__name__}, not a plain nn.Linear",
                "Merge adapters (merge_and_unload), dequantize, or remove parametrizations first.",
            )
    elif name == "act_fn":
        if kind.__name__ not in _SILU:
            raise _Unfit(f" is {kind.__name__}", "Only gates by SiLU are built in.")
    elif not str(source := getattr(kind.forward, "__module__", None)).startswith("transformers."):
        raise _Unfit(
            f" is a {kind.__name__} whose forward is defined in {source}, not in transformers, "
            "and would not run",
            "Use the original class, and apply no patches that replace its forward.",
        )
    if name == "self_attn":
        _check_attention(module)
    if "forward" in module.__dict__:
        raise _Unfit(
            " has a forward of its own, which would not run",
            "Undo what replaced it (a patch, accelerate's hooks, kernelize), or reload the model.",
        )
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    for found in (*hooks, module._backward_hooks, module._backward_pre_hooks):
        # Our own traces mark a module's calls by hooks that compute nothing.
        if found and not all(_is_ours(hook) for hook in found.values()):
            raise _Unfit(
                " has hooks, which would not run",
                "Remove them; hooks on parameters, on the embedding and on the Decoder do run.",
            )


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("codetta.")


def _check_attention(attention: Any) -> None:
    if getattr(attention, "attention_dropout", 0.0):
        raise _Unfit(" has attention dropout", "Load the model with attention_dropout=0.0.")
    if not getattr(attention, "is_causal", True):
        raise _Unfit(" is not causal", "Set is_causal = True on it.")


def _check_weight(name: str, w: Tensor, like: Tensor) -> None:
    if type(w) is not nn.Parameter and type(w) is not Tensor:
        raise _Unfit(
            f".{name} is a {type(w).__name__}, not a plain parameter",
            "Dequantize it, or gather its shards, first.",
        )
    if w.dtype != like.dtype or w.device != like.device:
        raise _Unfit(
            f".{name} is {w.dtype} on {w.device}, the embedding is {like.dtype} on {like.device}",
            "Convert the model to one dtype and device: model.to(device, dtype).",
        )
