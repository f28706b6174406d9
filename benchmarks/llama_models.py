"""Who is measured in llama.py: a Hugging Face model, trained as is or through each contender.

All contenders of a case share one set of parameters. Each has its own modules around them, so that
what one changes (an attention implementation, patched methods) the others do not see.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

#: Name under which attention with a causal fast path is registered in transformers.
CAUSAL = "causal_fast_path"


@dataclass(frozen=True)
class Case:
    """A model and the tokens of a step.

    Attributes:
        kind: 'llama' or 'qwen3'.
        sizes: of the transformers configuration.
        batch, seq: sequences per step, tokens per sequence.
    """

    name: str
    kind: str
    sizes: dict[str, Any]
    batch: int = 2
    seq: int = 8192


def _sizes(
    hidden: int, mlp: int, layers: int, heads: int, kv: int, head: int, vocab: int, tied: bool
) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head,
        "vocab_size": vocab, "tie_word_embeddings": tied,
    }  # fmt: skip


CASES = {
    c.name: c
    for c in (
        Case("llama-1b", "llama", _sizes(2048, 8192, 16, 32, 8, 64, 128256, True)),
        Case("qwen3-0.6b", "qwen3", _sizes(1024, 3072, 28, 16, 8, 128, 151936, True)),
        Case("llama-8b-4", "llama", _sizes(4096, 14336, 4, 32, 8, 128, 128256, False)),
        Case("smollm2-135m", "llama", _sizes(576, 1536, 30, 9, 3, 64, 49152, True), 1, 128),
        Case("tiny", "llama", _sizes(64, 96, 2, 4, 2, 16, 640, True), batch=2, seq=16),
        Case("tiny-qwen3", "qwen3", _sizes(64, 96, 2, 4, 2, 16, 640, True), batch=2, seq=16),
    )
}


def build(case: Case, dtype: torch.dtype, device: str) -> Any:
    """The model with random weights of ``dtype``; rotary frequencies stay in fp32."""
    import transformers

    made = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_of, model_of = made[case.kind]
    config = config_of(**case.sizes, max_position_embeddings=case.seq)
    torch.manual_seed(0)
    with torch.device(device):
        model = model_of(config)
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model.train()


def two_layers(name: str) -> Case:
    """A case with two of its layers, whose kernels are those of all."""
    case = CASES[name]
    return replace(case, sizes={**case.sizes, "num_hidden_layers": 2})


def sharing(model: Any) -> Any:
    """The modules anew around the same parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


# -------------------------------------------------------------------------------- contenders
@dataclass
class Contender:
    """Forward passes of one contender.

    Attributes:
        loss: input_ids to the mean next-token loss.
        hidden: input_ids to the decoder's last hidden states, without the head.
        rewriting: seconds that CODA's rewriter took so far, one entry per graph.
    """

    loss: Callable[[Tensor], Tensor]
    hidden: Callable[[Tensor], Tensor]
    rewriting: list[float] = field(default_factory=list)


def _of(model: Any, wrap: Callable[[Any], Any], use_cache: bool) -> Contender:
    whole, decoder = wrap(model), wrap(model.model)
    return Contender(
        lambda ids: whole(input_ids=ids, labels=ids, use_cache=use_cache).loss,
        lambda ids: decoder(input_ids=ids, use_cache=use_cache).last_hidden_state,
    )


def _rest() -> str:
    """Without a GPU nothing generates code: the scripts are tested, not the speed."""
    return "inductor" if torch.cuda.is_available() else "aot_eager"


def _compiler(model: Any) -> Any:
    return torch.compile(model, backend=_rest(), dynamic=False)


def eager(model: Any) -> Contender:
    return _of(sharing(model), lambda m: m, use_cache=False)


def compiled(model: Any) -> Contender:
    return _of(sharing(model), _compiler, use_cache=False)


def compiled_with_cache(model: Any) -> Contender:
    """transformers' default: keys and values of every layer are outputs of the graph."""
    return _of(sharing(model), _compiler, use_cache=True)


def compiled_causal(model: Any) -> Contender:
    return _of(_with_causal_attention(sharing(model)), _compiler, use_cache=False)


def liger(model: Any) -> Contender:
    """As Liger's users have it: its rotation is exchanged in the module that defines the model.

    Here that lasts only while this contender's forward runs.
    """
    from unittest import mock

    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    home = _home(model)

    def exchanging(m: Any) -> Callable[..., Any]:
        def run(**arguments: Any) -> Any:
            with mock.patch.object(home, "apply_rotary_pos_emb", liger_rotary_pos_emb):
                return m(**arguments)

        return run

    return _of(_with_liger(sharing(model)), exchanging, use_cache=False)


def liger_compiled(model: Any) -> Contender:
    """Liger's norms, MLP and loss; the rotation stays the model's own.

    Inductor fuses that one with its neighbours. Liger's is a Triton kernel, which it cannot fuse
    and of which Dynamo has to assume, with a warning, that it writes to every input.
    """
    twin = _with_causal_attention(_with_liger(sharing(model)))
    return _of(twin, _compiler, use_cache=False)


def coda(
    model: Any, logits: str = "keep", memory: int | None = None, recompute: bool = True
) -> Contender:
    from unittest import mock

    from codetta.capture import backend

    rewriting: list[float] = []
    rewrite = backend.rewrite

    def timed(*arguments: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        try:
            return rewrite(*arguments, **options)
        finally:
            rewriting.append(time.perf_counter() - begun)

    def observed(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(ids: Tensor) -> Tensor:
            with mock.patch.object(backend, "rewrite", timed):
                return forward(ids)

        return run

    def compiler(m: Any) -> Any:
        import codetta

        return codetta.compile(
            m, dynamic=False, logits=logits, loss_memory_limit=memory, recompute=recompute
        )

    made = _of(sharing(model), compiler, use_cache=False)
    return Contender(observed(made.loss), observed(made.hidden), rewriting)


def coda_without_logits(model: Any) -> Contender:
    return coda(model, logits="none")


def coda_with_4_gib(model: Any) -> Contender:
    return coda(model, logits="none", memory=4 << 30)


def coda_keeping_y(model: Any) -> Contender:
    """SwiGLU's output is kept for the backward instead of computed and stored again."""
    return coda(model, logits="none", recompute=False)


CONTENDERS: dict[str, Callable[[Any], Contender]] = {
    "eager": eager,
    "torch.compile": compiled,
    "torch.compile, use_cache": compiled_with_cache,
    "torch.compile, causal": compiled_causal,
    "Liger": liger,
    "Liger + torch.compile, causal": liger_compiled,
    "CODA": coda,
    "CODA, no logits": coda_without_logits,
    "CODA, no logits, 4 GiB": coda_with_4_gib,
    "CODA, no logits, y kept": coda_keeping_y,
}
#: The same as another where there is no head.
STEP_ONLY = ("CODA, no logits", "CODA, no logits, 4 GiB")


# ------------------------------------------------------------------------------ modifications
def _with_causal_attention(model: Any) -> Any:
    """Attention as one would write it by hand: no mask is built, SDPA is told that it is causal."""
    from transformers import AttentionInterface

    AttentionInterface.register(CAUSAL, _causal_attention)
    model.config._attn_implementation = CAUSAL
    return model


def _causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **ignored: Any,
) -> tuple[Tensor, None]:
    assert attention_mask is None and dropout == 0.0
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _with_liger(model: Any) -> Any:
    """Liger's kernels in this instance alone, except for the rotation.

    Liger also exchanges names in the module that defines the model: these are put back.
    """
    from liger_kernel import transformers as kernels

    home = vars(_home(model))
    before = dict(home)
    apply = getattr(kernels, f"apply_liger_kernel_to_{model.config.model_type}")
    apply(rope=False, model=model)
    home.update(before)
    return model


def _home(model: Any) -> ModuleType:
    """The module that defines the model."""
    return sys.modules[type(model).__module__]
