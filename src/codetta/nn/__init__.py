"""Modules: a decoder whose layers run as GEMM-epilogue Plans."""

from __future__ import annotations

from codetta.nn.attention import Heads, causal_attention
from codetta.nn.block import Spec, segment, segment_plan
from codetta.nn.decoder import Decoder, DecoderOutput, next_token_loss
from codetta.nn.function import apply_plan
from codetta.nn.loss import LinearCrossEntropyLoss

__all__ = [
    "Decoder", "DecoderOutput", "Heads", "LinearCrossEntropyLoss", "Spec", "apply_plan",
    "causal_attention", "next_token_loss", "segment", "segment_plan",
]  # fmt: skip
