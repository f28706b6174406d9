"""Tiny random models of many families, Hugging Face's and hand-written, that the rewriter reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

VOCABULARY, HIDDEN, HEADS = 53, 32, 4
_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_NO_DROPOUT = dict.fromkeys(
    ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0
)
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8}
#: Name -> (class prefix, changes of the configuration).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "gemma2": ("Gemma2", _GEMMA),
    "gemma3": ("Gemma3", _GEMMA),
    "phi3": ("Phi3", {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "experts_implementation": "eager"}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
        | {"experts_implementation": "eager"},
    ),
}
#: Not looked at while the rewriter was written.
KEPT_BACK: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("Olmo2", {}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.5, "hidden_dropout": 0.0}),
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": None, "hidden_dropout": 0.0}),
    "cohere": ("Cohere", {}),
    "granite": ("Granite", {"residual_multiplier": 0.5, "embedding_multiplier": 2.0}),
}
_HAND_WRITTEN: dict[str, Callable[[], nn.Module]] = {}
#: Experts are chosen by values, which breaks the graph.
BREAKS = ("mixtral", "qwen3_moe")


def names() -> list[str]:
    return [*FAMILIES, "gpt2", "bert", *_HAND_WRITTEN, *KEPT_BACK]


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A model with two layers; norms and biases are random, dropout is off, loss is returned."""
    torch.manual_seed(0)
    model = _made(name, changes)
    for p in model.parameters():
        if p.ndim == 1:
            p.data += 0.1 * torch.randn_like(p)
        else:
            nn.init.normal_(p, std=0.15)
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model.train()


def _made(name: str, changes: dict[str, Any]) -> nn.Module:
    if name in _HAND_WRITTEN:
        return _HAND_WRITTEN[name]()
    if name == "gpt2":
        sizes = {"n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "n_positions": 64}
        config = transformers.GPT2Config(
            **sizes, vocab_size=VOCABULARY, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **changes
        )
        model = transformers.GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"
        return model
    if name == "bert":
        sizes = {k: v for k, v in _SIZES.items() if k != "num_key_value_heads"}
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes | off | changes))
    prefix, own = (FAMILIES | KEPT_BACK)[name]
    text = "TextConfig" if prefix == "Gemma3" else "Config"
    config = getattr(transformers, f"{prefix}{text}")(
        **{k: v for k, v in (_SIZES | own | changes).items() if v is not None or k[-3:] == "_id"}
        | ({"sliding_window": None} if "sliding_window" in own and own["sliding_window"] is None
           else {})
    )  # fmt: skip
    return getattr(transformers, f"{prefix}ForCausalLM")(config)


def batch(name: str, tokens: int = 6, rows: int = 2) -> dict[str, Any]:
    """Arguments of a training step."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (rows, tokens), generator=generator)
    cache = {} if name == "bert" or name in _HAND_WRITTEN else {"use_cache": False}
    return {"input_ids": ids, "labels": ids, **cache}


# ------------------------------------------------------------------------------- hand-written
@dataclass
class Output:
    loss: Tensor
    logits: Tensor


def _hand_written(name: str) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    def register(made: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        _HAND_WRITTEN[name] = made
        return made

    return register


class _GptBlock(nn.Module):
    """Pre-norm, packed q, k and v, GELU: the layout of nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(d, dim=2)
        q, k, v = (y.view(b, t, HEADS, d // HEADS).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class _TitanBlock(nn.Module):
    """RMSNorm, SwiGLU, grouped heads; rotation by complex numbers: the layout of torchtitan."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.wq, self.wo = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(HIDDEN, HIDDEN // 2, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(HIDDEN, 48, bias=False) for _ in range(2))
        self.w2 = nn.Linear(48, HIDDEN, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        b, t, d = x.shape
        size = d // HEADS
        h = self.norm1(x)
        q, k, v = (w(h).view(b, t, -1, size) for w in (self.wq, self.wk, self.wv))
        q, k = (self._turned(y, turn) for y in (q, k))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(y.transpose(1, 2).contiguous().view(b, t, d))
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))

    @staticmethod
    def _turned(x: Tensor, turn: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn[None, :, None]).flatten(3).type_as(x)


class _HandWritten(nn.Module):
    def __init__(self, block: type[nn.Module], norm: type[nn.Module]) -> None:
        super().__init__()
        self.turns = block is _TitanBlock
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = None if self.turns else nn.Embedding(64, HIDDEN)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm, self.head = norm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        x, t = self.embedding(input_ids), input_ids.shape[1]
        extra: tuple[Tensor, ...] = ()
        if self.positions is not None:
            x = x + self.positions(torch.arange(t))
        else:
            size = HIDDEN // HEADS
            angles = torch.outer(torch.arange(t), 100.0 ** (-torch.arange(0, size, 2) / size))
            extra = (torch.polar(torch.ones_like(angles), angles),)
        for block in self.blocks:
            x = block(x, *extra)
        logits = self.head(self.norm(x)).float()
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


@_hand_written("nano_gpt")
def _nano_gpt() -> nn.Module:
    return _HandWritten(_GptBlock, nn.LayerNorm)


@_hand_written("titan")
def _titan() -> nn.Module:
    return _HandWritten(_TitanBlock, nn.RMSNorm)
