"""A stand-in for CODA's decoder, so that the demo is tested apart from what it demonstrates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from codetta.demo import models, stock


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Dynamo compiles one function for a few models only, and every test has its own model."""
    torch._dynamo.reset()


class StandIn(nn.Module):
    """Computes what the Hugging Face model computes, behind the decoder's interface."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.__dict__["hf"] = model  # not a submodule: parameters keep the model's own names
        for name, child in model.named_children():
            self.add_module(name, child)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.hf(input_ids=input_ids, labels=labels, use_cache=False)

    def cost_table(self, *, tokens: int, positions: int, dtype: torch.dtype) -> Any:
        shape = stock.LayerShape.of(self.hf.config, tokens // positions, positions)
        return stock.cost_table(shape, dtype)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """stand_in(break_it) puts the stand-in in the decoder's place (`--form decoder`);
    `break_it(decoder)` may spoil it.
    """

    def install(break_it: Callable[[StandIn], Any] = lambda decoder: None) -> None:
        def through_coda(model: Any) -> StandIn:
            decoder = StandIn(model)
            break_it(decoder)
            return decoder

        monkeypatch.setattr(models, "through_coda", through_coda)

    return install


@pytest.fixture
def tiny_llama() -> Callable[..., Any]:
    """tiny_llama(heads, kv_heads, dtype): two layers, sizes that are no powers of two."""
    import transformers

    def build(heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> Any:
        config = transformers.LlamaConfig(
            hidden_size=36,
            intermediate_size=72,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=16,
            vocab_size=61,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        return models.copy_of(model, dtype, torch.device("cpu"))

    return build
