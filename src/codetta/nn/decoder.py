"""A Llama-architecture decoder that runs as Plans and shares a Hugging Face model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from codetta.backends.select import backend_for, tiling_for
from codetta.errors import AutocastUnsupported, BadRank
from codetta.nn.attention import Heads, attention_pairs, causal_attention
from codetta.nn.block import (
    ADJACENT,
    BACKWARD,
    ENTRY,
    EXIT,
    HALVES,
    MIDDLE,
    Rules,
    Spec,
    compiled,
    head,
    segment,
)
from codetta.nn.cost import layers_cost
from codetta.nn.function import apply_plan
from codetta.nn.hf import layers_of, specification
from codetta.nn.support import check_model
from codetta.plan import Cost, Plan, Schedule

HEAD = "head"
HEAD_RULES: Rules = ()  # see block.head_plan


@dataclass
class DecoderOutput:
    """loss (scalar, None without labels) and logits (B, T, V)."""

    loss: Tensor | None
    logits: Tensor


class Decoder(nn.Module):
    """The decoder of a Hugging Face model, computed by GEMM-epilogue Plans.

    Build it with :meth:`from_hf`. It holds the very modules of that model, so parameters are
    shared, ``state_dict`` has the same names, tied weights stay tied, and training either trains
    both. What the modules would compute is taken from their configuration, not from their
    ``forward``; a module that computes anything else is refused.
    """

    model: Any  # the backbone
    lm_head: Any
    config: Any

    def __init__(self, model: Any) -> None:
        super().__init__()
        check_model(model)
        self.model = model.model
        self.lm_head = model.lm_head
        self.config = model.config
        self.__dict__["_source"] = (model,)  # not a submodule: its parameters are ours already
        specification(self)

    @classmethod
    def from_hf(cls, model: Any) -> Decoder:
        """A Decoder over the parameters of a Llama-architecture ``...ForCausalLM``.

        Supported: Llama, Mistral without sliding window, Qwen2 (q, k, v bias), Qwen3 (q/k norm),
        with tied or untied head, grouped-query attention and any rotary scaling.

        Raises:
            UnsupportedModel: with the part that is not supported.
        """
        return cls(model)

    def save_pretrained(self, directory: str | Path, **kwargs: Any) -> None:
        """Save as the Hugging Face model would; its ``from_pretrained`` reads it back."""
        self.__dict__["_source"][0].save_pretrained(directory, **kwargs)

    # ---- forward
    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> DecoderOutput:
        """Logits and, with labels, the next-token loss.

        Args:
            input_ids: (B, T) integers.
            labels: (B, T), -100 where no loss is wanted; shifted here, as in transformers.
            attention_mask: (B, T), 0 for padding; None means no padding.
            position_ids: (B, T) or (1, T); 0 to T - 1 by default. Without attention_mask a jump in
                them starts the next of several packed sequences, as in transformers.
            num_items_in_batch: divides the summed loss; default: the number of labels.

        Layers whose ``gradient_checkpointing`` is on (``gradient_checkpointing_enable()``) keep
        their input only and run again in the backward.

        Raises:
            AutocastUnsupported: under torch.autocast.
            UnsupportedModel: a module was hooked or replaced since the Decoder was made.
            BadRank: a shape is not as above.
        """
        if torch.is_autocast_enabled(input_ids.device.type):
            raise AutocastUnsupported(device=input_ids.device.type)
        spec = specification(self)  # anew: hooks or adapters may have come since
        batch, tokens = _checked_shape(input_ids, labels, attention_mask, position_ids)
        pairs = attention_pairs(batch, tokens, attention_mask, position_ids)
        x = self.model.embed_tokens(input_ids).reshape(batch * tokens, spec.hidden)
        constants: dict[str, Any] = {"rope": self._rope(x, spec, batch, tokens, position_ids)}
        if spec.qk_norm:
            constants["is_qk"] = _is_qk(spec, x)
        with torch.profiler.record_function("region:layers"):
            x, r = self._layers(spec, x, constants, batch, pairs)
        with torch.profiler.record_function("region:head"):
            vocabulary = self.lm_head.out_features
            inputs = {
                "x": x,
                "r": r,
                "norm": self.model.norm.weight,
                "head": self.lm_head.weight,
            }
            found = apply_plan(head(spec.hidden, vocabulary), inputs, HEAD_RULES)
            logits = found["logits"].view(batch, tokens, vocabulary)
        loss = None
        if labels is not None:
            with torch.profiler.record_function("region:loss"):
                loss = next_token_loss(logits, labels, num_items_in_batch)
        return DecoderOutput(loss, logits)

    def _layers(
        self, spec: Spec, x: Tensor, constants: dict[str, Any], batch: int, pairs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x after the last layer and r of the last norm."""
        layers = layers_of(self)

        def step(i: int, x: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor]:
            heads = Heads(spec.heads, spec.kv_heads, spec.head_dim, layers[i].scale)
            o = causal_attention(qkv, heads, batch, pairs)
            given = {"x": x, "o": o, **layers[i].mlp_weights(), **constants}
            if i + 1 == len(layers):
                out = _run(replace(spec, part=EXIT), given)
                return out["x_out"], out["r"]
            given |= layers[i + 1].attention_weights()
            out = _run(replace(spec, part=MIDDLE), given)
            return out["x_out"], out["qkv"]

        out = _run(spec, {"x": x, **layers[0].attention_weights(), **constants})
        x, result = out["x_out"], out["qkv"]
        for i, layer in enumerate(layers):
            if layer.recomputed:
                x, result = checkpoint(step, i, x, result, use_reentrant=False)
            else:
                x, result = step(i, x, result)
        return x, result

    def _rope(
        self, x: Tensor, spec: Spec, batch: int, tokens: int, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rotary tables [cos | sin] of the positions in use, and each token's row in them."""
        if position_ids is None:
            position_ids = torch.arange(tokens, device=x.device)[None]
        like = x.new_empty(0, dtype=torch.promote_types(torch.float32, x.dtype))
        cos, sin = self.model.rotary_emb(like, position_ids)  # not rounded to 16 bits
        half = spec.rotary_dim // 2
        table = torch.cat((cos[..., :half], sin[..., :half]), dim=-1).flatten(0, 1)
        rows = torch.arange(table.shape[0], device=x.device).view(position_ids.shape)
        return table, rows.expand(batch, tokens).reshape(-1)

    # ---- what it does, for people
    @property
    def spec(self) -> Spec:
        """Sizes of the layers."""
        return specification(self)

    def plans(self) -> dict[str, Plan]:
        """The optimized Plans by name: entry, middle, exit, head."""
        return self._plans(HALVES)

    def _plans(self, pairs: str) -> dict[str, Plan]:
        parts = {p: segment(replace(self.spec, part=p), pairs) for p in (ENTRY, MIDDLE, EXIT)}
        return parts | {HEAD: head(self.spec.hidden, self.lm_head.out_features)}

    def schedules(self) -> dict[str, Schedule]:
        """Forward and backward schedules of a layer with all weights trained, by name."""
        return self._schedules(HALVES)

    def _schedules(self, pairs: str) -> dict[str, Schedule]:
        found = {}
        for name, plan in self._plans(pairs).items():
            rules = HEAD_RULES if name == HEAD else BACKWARD
            parts = compiled(plan, trained(plan), tuple(o.name for o in plan.outputs), rules)
            found[name] = parts.forward
            if parts.backward is not None:
                found[f"{name} backward"] = parts.backward
        return found

    def cost_table(
        self, *, tokens: int, dtype: torch.dtype, positions: int | None = None
    ) -> list[Cost]:
        """Kernels and bytes of all layers, forward and backward, from the Plans alone.

        They are those of the backend that runs where the parameters lie.

        Args:
            tokens: M = B T.
            dtype: of weights and activations.
            positions: T, the rows of the rotary tables; M by default (one sequence).
        """
        here = self.lm_head.weight
        return layers_cost(
            self.spec,
            len(layers_of(self)),
            self._schedules(_pairs(here)),
            tokens=tokens,
            dtype=dtype,
            positions=positions or tokens,
            tiling=tiling_for(here),
        )


def _run(spec: Spec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    plan = segment(spec, _pairs(given["x"]))
    return apply_plan(plan, {i.name: given[i.name] for i in plan.inputs})


def _pairs(x: Tensor) -> str:
    """Pair layout of the backend that runs where x lies."""
    return ADJACENT if backend_for(x).name == "cuda" else HALVES


def _is_qk(spec: Spec, x: Tensor) -> Tensor:
    """1 for the columns of q and k, 0 for those of v."""
    v = spec.kv_heads * spec.head_dim
    return torch.cat((x.new_ones(spec.qkv - v), x.new_zeros(v)))


def _checked_shape(
    input_ids: Tensor, labels: Tensor | None, mask: Tensor | None, position_ids: Tensor | None
) -> tuple[int, int]:
    if input_ids.ndim != 2:
        raise BadRank(
            name="input_ids",
            given=tuple(input_ids.shape),
            expected="(batch, tokens)",
            fix="Add the batch dimension with input_ids[None].",
        )
    shape = (input_ids.shape[0], input_ids.shape[1])
    for name, x in (("labels", labels), ("attention_mask", mask), ("position_ids", position_ids)):
        allowed = {shape, (1, shape[1])} if x is position_ids else {shape}
        if x is not None and tuple(x.shape) not in allowed:
            raise BadRank(
                name=name,
                given=tuple(x.shape),
                expected=" or ".join(map(str, sorted(allowed))),
                fix="It says one thing about each token of input_ids.",
            )
    return shape


def trained(plan: Plan) -> tuple[str, ...]:
    """Inputs of a Plan that have gradients when every weight is trained."""
    return tuple(i.name for i in plan.inputs if i.name not in ("rope", "is_qk"))


def next_token_loss(
    logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Cross-entropy of token t + 1 given the logits at t, in fp32 or wider.

    Mean over the labels that are not -100 (NaN if there is none), or sum / num_items_in_batch.
    """
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1).to(logits.device)
    wide = torch.promote_types(torch.float32, logits.dtype)
    flat = logits.to(wide).flatten(0, -2)
    if num_items_in_batch is None:
        return F.cross_entropy(flat, shifted, ignore_index=-100)
    return F.cross_entropy(flat, shifted, ignore_index=-100, reduction="sum") / num_items_in_batch
