"""Reading a Hugging Face model: its layers' sizes and weights.

Nothing is imported from transformers: a model is recognized by its modules' types, attributes and
configuration, so a new release breaks this only where it changes what a layer computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from codetta.nn.block import ENTRY, Spec
from codetta.nn.support import (
    ATTENTION,
    MLP,
    check_config,
    check_modules,
    unsupported,
)


@dataclass(frozen=True)
class Layer:
    """One decoder layer's modules, read as a Plan's inputs."""

    module: Any

    def attention_weights(self) -> dict[str, Tensor]:
        """norm_attn, wq, wk, wv, biases and q/k norm of this layer."""
        attention = self.module.self_attn
        found = {"norm_attn": self.module.input_layernorm.weight}
        for name, attribute in ATTENTION.items():
            found |= _linear(name, getattr(attention, attribute))
        if hasattr(attention, "q_norm"):
            found |= {"norm_q": attention.q_norm.weight, "norm_k": attention.k_norm.weight}
        return found

    def mlp_weights(self) -> dict[str, Tensor]:
        """norm_mlp, wo, wg, wu, wd and biases of this layer."""
        found = {"norm_mlp": self.module.post_attention_layernorm.weight}
        found |= _linear("wo", self.module.self_attn.o_proj)
        for name, attribute in MLP.items():
            found |= _linear(name, getattr(self.module.mlp, attribute))
        return found

    @property
    def scale(self) -> float:
        """Of the attention scores."""
        return float(self.module.self_attn.scaling)

    @property
    def recomputed(self) -> bool:
        """Gradient checkpointing, as ``gradient_checkpointing_enable`` of transformers sets it."""
        return bool(getattr(self.module, "gradient_checkpointing", False) and self.module.training)


def _linear(name: str, module: Any) -> dict[str, Tensor]:
    found = {name: module.weight}
    if module.bias is not None:
        found[f"b_{name[1:]}"] = module.bias
    return found


def layers_of(model: Any) -> list[Layer]:
    """The layers in use: as many as the configuration says."""
    return [Layer(m) for m in model.model.layers[: model.config.num_hidden_layers]]


def specification(model: Any) -> Spec:
    """Sizes of a model's layers. Raises UnsupportedModel naming what is not supported."""
    layers = [layer.module for layer in layers_of(model)]
    check_config(model.config)
    check_modules(model.model, model.lm_head, layers)
    specs = [_layer_spec(layer) for layer in layers]
    for i, spec in enumerate(specs):
        if spec != specs[0]:
            raise unsupported(
                f"layers 0 and {i} differ: {specs[0]} and {spec}",
                "Only layers of one size are supported.",
            )
    final = _eps(model.model.norm)
    if final != specs[0].eps:
        raise unsupported(
            f"the last norm has eps {final}, the layers' have {specs[0].eps}", "Make them equal."
        )
    return specs[0]


def _layer_spec(layer: Any) -> Spec:
    attention, mlp = layer.self_attn, layer.mlp
    named = {n: getattr(attention, a) for n, a in ATTENTION.items()}
    named |= {"wo": attention.o_proj} | {n: getattr(mlp, a) for n, a in MLP.items()}
    head_dim, qk_norm = attention.head_dim, hasattr(attention, "q_norm")
    eps = _eps(layer.input_layernorm)
    if qk_norm and {_eps(attention.q_norm), _eps(attention.k_norm)} != {eps}:
        raise unsupported("its q and k norms have an eps of their own", "Make them equal.")
    return Spec(
        part=ENTRY,
        hidden=attention.q_proj.in_features,
        mlp=mlp.gate_proj.out_features,
        heads=attention.q_proj.out_features // head_dim,
        kv_heads=attention.k_proj.out_features // head_dim,
        head_dim=head_dim,
        rotary_dim=head_dim,
        eps=eps,
        eps_mlp=_eps(layer.post_attention_layernorm),
        biases=frozenset(n for n, module in named.items() if module.bias is not None),
        qk_norm=qk_norm,
    )


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon)
