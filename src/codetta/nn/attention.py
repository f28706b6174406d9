"""Causal attention on packed q, k and v, by PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """H query heads and G key-value heads of E columns; scale of the scores (E^-1/2 if None)."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float | None = None


def causal_attention(qkv: Tensor, heads: Heads, batch: int, mask: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ scale + causal) v for packed rows.

    Args:
        qkv: (B T, (H + 2 G) E).
        batch: B; T follows.
        mask: None for plain causal attention, else a boolean (B, 1, T, T) that allows pairs.

    Returns:
        (B T, H E); zero for a token that may attend to none.
    """
    tokens = qkv.shape[0] // batch if batch else 0
    sizes = [heads.heads, heads.kv_heads, heads.kv_heads]
    q, k, v = qkv.view(batch, tokens, sum(sizes), heads.head_dim).split(sizes, dim=2)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=heads.scale,
        enable_gqa=heads.heads != heads.kv_heads,
    )
    return out.transpose(1, 2).reshape(batch * tokens, heads.heads * heads.head_dim)


def attention_pairs(
    batch: int, tokens: int, attention_mask: Tensor | None, position_ids: Tensor | None
) -> Tensor | None:
    """The pairs that may attend, boolean (B, 1, T, T), or None for plain causal attention.

    As in transformers: with attention_mask (B, T), causally to the tokens it marks (padding in
    front sees nothing at all); else, with position_ids, causally within each run of consecutive
    positions, since a jump starts the next of several packed sequences.

    Given either, the pairs are spelled out, even if all are allowed: to look would make the host
    wait for the device. Leave them out for the fast path.
    """
    if attention_mask is None and position_ids is None:
        return None
    device = (position_ids if attention_mask is None else attention_mask).device  # type: ignore[union-attr]
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    if attention_mask is not None:
        return causal & attention_mask.bool()[:, None, None, :]
    assert position_ids is not None
    first = position_ids[:, :1] - 1
    run = (position_ids.diff(dim=-1, prepend=first) != 1).cumsum(-1)
    same = run[:, None, :, None] == run[:, None, None, :]
    return (causal & same).expand(batch, 1, tokens, tokens)
