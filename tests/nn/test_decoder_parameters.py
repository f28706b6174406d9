"""A Decoder holds the Hugging Face model's parameters: shared, tied, saved, frozen as they are."""

from __future__ import annotations

import copy

import pytest
import torch
from decoder_models import Launches, exact, gradients, make, step, tokens, transformers
from helpers.budget import norm

from codetta.nn import Decoder


def test_parameters_are_the_models_own():
    model = make()
    decoder = Decoder.from_hf(model)
    theirs = dict(model.named_parameters())
    assert list(theirs) == [n for n, _ in decoder.named_parameters()]
    assert all(p is theirs[n] for n, p in decoder.named_parameters())


def test_running_copies_no_parameter():
    model = make()
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    step(Decoder.from_hf(model), tokens())
    assert before == {n: p.data_ptr() for n, p in model.named_parameters()}


def test_the_model_is_left_as_it_was():
    model = make("qwen3")

    def state() -> dict:
        return {n: (m, type(m), type(m).forward, set(vars(m))) for n, m in model.named_modules()}

    before = state()
    step(Decoder.from_hf(model), tokens())
    assert state() == before


def test_either_trains_both():
    model, ids = make(), tokens()
    decoder = Decoder.from_hf(model)
    step(decoder, ids)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(decoder(ids).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("family", ["llama_tied", "qwen3"])
def test_state_dict_is_the_models(family):
    model, other, ids = make(family), make(family), tokens()
    decoder = Decoder.from_hf(model)
    assert list(decoder.state_dict()) == list(model.state_dict())
    for p in other.parameters():
        p.data.mul_(0.5)
    decoder.load_state_dict(other.state_dict())
    assert torch.equal(decoder(ids).logits, Decoder.from_hf(other)(ids).logits)


def test_deepcopy_shares_within_the_copy_only():
    model, ids = make("llama_tied"), tokens()
    decoder = Decoder.from_hf(model)
    twin = copy.deepcopy(decoder)
    assert torch.equal(twin(ids).logits, decoder(ids).logits)
    twin.model.norm.weight.data.zero_()
    assert decoder(ids).logits.abs().sum() > 0
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert twin.lm_head.weight is not model.lm_head.weight


@pytest.mark.parametrize("family", ["llama_tied", "llama_biases"])
def test_saved_model_is_read_by_transformers(family, tmp_path):
    model, ids = make(family), tokens()
    decoder = Decoder.from_hf(model)
    copy.deepcopy(decoder).save_pretrained(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(read) is type(model)
    assert torch.equal(Decoder.from_hf(read)(ids).logits, decoder(ids).logits)


def test_conversion_converts_the_shared_model():
    model = make()
    decoder = Decoder.from_hf(model).to(torch.bfloat16)
    assert decoder(tokens()).logits.dtype == model.lm_head.weight.dtype == torch.bfloat16


def test_tied_embeddings_stay_tied():
    model, ids = make("llama_tied", torch.float64), tokens()
    decoder = Decoder.from_hf(model)
    assert decoder.lm_head.weight is decoder.model.embed_tokens.weight
    name = "model.embed_tokens.weight"
    ours, theirs = step(decoder, ids).gradients[name], exact(model, ids).gradients[name]
    assert norm(ours - theirs) <= 1e-10 * norm(theirs)


@pytest.mark.parametrize("family", ["llama_tied", "qwen2"])
def test_five_steps_of_adamw_equal_the_models(family):
    stock, model = make(family), make(family)
    decoder, ids = Decoder.from_hf(model), tokens()
    for trained in (stock, decoder):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
        losses = []
        for _ in range(5):
            losses.append(step(trained, ids).loss)
            optimizer.step()
        assert losses[-1] < losses[0]
    for (name, p), q in zip(stock.named_parameters(), model.parameters(), strict=True):
        if not name.endswith("k_proj.bias"):  # its gradient is zero: AdamW amplifies the rounding
            torch.testing.assert_close(p, q, atol=2e-5, rtol=1e-5, msg=name)


# --------------------------------------------------------------------------------- frozen
FROZEN = {
    "projections": lambda name: "_proj" in name or name == "lm_head.weight",
    "all but norms": lambda name: "norm" not in name,
    "norms": lambda name: "norm" in name,
    "embedding": lambda name: name == "model.embed_tokens.weight",
    "first layer and embedding": lambda name: "layers.0" in name or "embed" in name,
    "all but head": lambda name: name != "lm_head.weight",
    "all but one": lambda name: name != "model.layers.1.mlp.up_proj.weight",
    "biases": lambda name: name.endswith("bias"),
}


@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_weights_get_no_gradient_and_the_others_theirs(frozen):
    model, ids = make("qwen2", torch.float64), tokens()
    ref = exact(model, ids)
    for name, p in model.named_parameters():
        p.requires_grad_(not FROZEN[frozen](name))
    found = step(Decoder.from_hf(model), ids).gradients
    assert set(found) == {n for n in ref.gradients if not FROZEN[frozen](n)}
    largest = max(norm(g) for g in ref.gradients.values())
    for name, g in found.items():
        assert norm(g - ref.gradients[name]) <= 1e-10 * max(norm(g), 1e-3 * largest), name


def gemms(model, ids) -> int:
    """In one forward and backward."""
    with Launches() as launches:
        step(Decoder.from_hf(model), ids)
    return launches.count["gemm"]


def test_a_frozen_weight_costs_no_wgrad():
    model, ids = make(), tokens()
    everything = gemms(model, ids)
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    assert gemms(model, ids) == everything - 1


def test_frozen_projections_cost_no_wgrad_even_with_trained_norms():
    model, ids = make(), tokens()
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name)
    forward, dgrads = 2 * 4 + 1, 2 * 4 + 1
    assert gemms(model, ids) == forward + dgrads


def test_nothing_below_the_first_trained_weight_runs_backward():
    model, ids = make(num_hidden_layers=3), tokens()
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    assert gemms(model, ids) == 3 * 4 + 2
    assert set(gradients(model)) == {"lm_head.weight"}


def test_a_fully_frozen_model_records_no_graph():
    model = make().requires_grad_(False)
    assert not Decoder.from_hf(model)(tokens()).logits.requires_grad
