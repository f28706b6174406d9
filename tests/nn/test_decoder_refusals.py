"""What a Decoder would compute differently is refused, when it is made and at every later call."""

from __future__ import annotations

import re
import types

import pytest
import torch
from decoder_models import make, tokens, transformers
from torch import nn

from codetta.errors import UnsupportedModel
from codetta.nn import Decoder


class LoraLinear(nn.Module):
    """As adapter libraries wrap a projection."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Parameter(torch.zeros(2, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, 2))

    @property
    def weight(self) -> nn.Parameter:
        return self.base_layer.weight

    @property
    def bias(self) -> nn.Parameter | None:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + x @ self.lora_a.t() @ self.lora_b.t()


class OtherNorm(nn.Module):
    variance_epsilon = 1e-6

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.weight)


class Quantized(torch.Tensor):
    """As quantization and sharding libraries replace a weight."""


def lora(model):
    model.model.layers[1].self_attn.v_proj = LoraLinear(model.model.layers[1].self_attn.v_proj)


def parametrized(model):
    nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.down_proj)


def quantized(model):
    up = model.model.layers[0].mlp.up_proj
    up.weight = nn.Parameter(up.weight.detach().as_subclass(Quantized))


def another_norm(model):
    model.model.norm = OtherNorm(model.model.norm.weight)


def patched_forward(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = types.MethodType(lambda self, x: 0 * x, mlp)


def projection_hook(model):
    model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda *_: None)


def layer_hook(model):
    model.model.layers[0].register_forward_pre_hook(lambda *_: None)


def backward_hook(model):
    model.model.layers[0].self_attn.register_full_backward_hook(lambda *_: None)


def sliding_window(model):
    model.config.sliding_window = 4


def mixed_layers(model):
    model.config.layer_types = ["full_attention", "sliding_attention"]


def gelu(model):
    model.model.layers[0].mlp.act_fn = nn.GELU()


def attention_dropout(model):
    model.model.layers[1].self_attn.attention_dropout = 0.1


def bidirectional(model):
    model.model.layers[0].self_attn.is_causal = False


def head_bias(model):
    model.lm_head.bias = nn.Parameter(torch.zeros(model.lm_head.out_features))


def smaller_layer(model):
    for name in ("gate_proj", "up_proj"):
        setattr(model.model.layers[1].mlp, name, nn.Linear(32, 24, bias=False))
    model.model.layers[1].mlp.down_proj = nn.Linear(24, 32, bias=False)


def one_eps_differs(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-3


def no_layers(model):
    model.model.layers = nn.ModuleList()


def quarter_precision(model):
    for p in model.parameters():
        p.data = p.data.to(torch.float8_e4m3fn)


#: What was done to the model -> a pattern that names it, and one that says how to fix it.
REFUSED = {
    lora: (r"model\.layers\.1\.self_attn\.v_proj is a LoraLinear", "merge_and_unload"),
    parametrized: (r"layers\.0\.mlp\.down_proj is a Parametrized", "remove parametrizations"),
    quantized: (r"layers\.0\.mlp\.up_proj\.weight is a Quantized", "Dequantize"),
    another_norm: (r"model\.norm is a OtherNorm", "original class"),
    patched_forward: (r"layers\.0\.mlp has a forward of its own", "Undo"),
    projection_hook: (r"layers\.1\.mlp\.gate_proj has hooks", "Remove them"),
    layer_hook: (r"layers\.0 has hooks", "Remove them"),
    backward_hook: (r"layers\.0\.self_attn has hooks", "Remove them"),
    sliding_window: ("sliding window of 4 tokens", "sliding_window=None"),
    mixed_layers: ("sliding_attention", "full_attention"),
    gelu: (r"layers\.0\.mlp\.act_fn is GELU", "SiLU"),
    attention_dropout: (r"layers\.1\.self_attn has attention dropout", r"attention_dropout=0\.0"),
    bidirectional: (r"layers\.0\.self_attn is not causal", "is_causal = True"),
    head_bias: ("head has a bias", "lm_head.bias = None"),
    smaller_layer: ("layers 0 and 1 differ", "one size"),
    one_eps_differs: ("layers 0 and 1 differ", "one size"),
    no_layers: ("no layers", "at least one"),
    quarter_precision: ("float8", "Convert them"),
}
cases = pytest.mark.parametrize("change", REFUSED, ids=lambda c: c.__name__)


def assert_refused(change, call) -> None:
    with pytest.raises(UnsupportedModel) as error:
        call()
    for pattern in REFUSED[change]:
        assert re.search(pattern, str(error.value)), str(error.value)


@cases
def test_is_refused_when_the_decoder_is_made(change):
    model = make()
    change(model)
    assert_refused(change, lambda: Decoder.from_hf(model))


@cases
def test_is_refused_when_done_later(change):
    model = make()
    decoder = Decoder.from_hf(model)
    change(model)
    assert_refused(change, lambda: decoder(tokens()))


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9)
        ),
    ],
    ids=["Linear", "GPT-2"],
)
def test_other_models_are_refused(model):
    with pytest.raises(UnsupportedModel, match=r"Give a \.\.\.ForCausalLM of type llama"):
        Decoder.from_hf(model)


def test_a_backbone_without_head_is_refused():
    with pytest.raises(UnsupportedModel, match="LlamaModel"):
        Decoder.from_hf(make().model)


def test_a_subclass_with_its_own_forward_is_refused():
    class Mine(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    with pytest.raises(UnsupportedModel, match="Mine whose forward is defined in"):
        Decoder.from_hf(Mine(make().config))


def test_a_subclass_that_adds_no_forward_is_fine():
    class Mine(transformers.LlamaForCausalLM):
        pass

    assert Decoder.from_hf(Mine(make().config))(tokens()).logits.isfinite().all()


def test_fewer_layers_by_configuration():
    model, ids = make(num_hidden_layers=3), tokens()
    model.config.num_hidden_layers = 2
    ours, theirs = Decoder.from_hf(model)(ids).logits, model(ids, use_cache=False).logits
    torch.testing.assert_close(ours, theirs)
