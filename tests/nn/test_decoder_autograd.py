"""A Decoder in autograd: repeated, accumulated, hooked, checkpointed; no second derivatives."""

from __future__ import annotations

import pytest
import torch
from decoder_models import Launches, exact, gradients, make, step, tokens
from helpers.budget import norm
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from codetta.errors import DoubleBackward
from codetta.nn import Decoder


@pytest.fixture
def decoder(backend):
    """In fp32 on the reference, in bf16 on the fused backend."""
    return Decoder.from_hf(make(dtype=torch.float32 if backend == "reference" else torch.bfloat16))


def test_every_backward_of_one_graph_is_equal(decoder):
    loss = decoder(tokens(), labels=tokens()).loss
    runs = []
    for _ in range(3):
        decoder.zero_grad()
        loss.backward(retain_graph=True)
        runs.append(gradients(decoder))
    for name, g in runs[0].items():
        assert all(torch.equal(g, other[name]) for other in runs[1:]), name


def test_a_second_backward_without_retain_graph_is_refused(decoder):
    loss = decoder(tokens(), labels=tokens()).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_accumulate(decoder):
    first, second = tokens(seed=1), tokens(seed=2)
    parts = [step(decoder, ids).gradients for ids in (first, second)]
    decoder.zero_grad()
    for ids in (first, second):
        decoder(ids, labels=ids).loss.backward()
    for name, p in decoder.named_parameters():
        torch.testing.assert_close(p.grad, parts[0][name] + parts[1][name], msg=name)


def test_the_same_call_gives_the_same_bits(decoder):
    one, two = step(decoder, tokens()), step(decoder, tokens())
    assert torch.equal(one.logits, two.logits)
    assert all(torch.equal(g, two.gradients[name]) for name, g in one.gradients.items())


def test_differentiating_the_backward_is_refused(decoder):
    loss = decoder(tokens(), labels=tokens()).loss
    weight = decoder.model.layers[0].mlp.up_proj.weight
    (g,) = torch.autograd.grad(loss, weight, create_graph=True)
    assert norm(g.detach()) > 0
    with pytest.raises(DoubleBackward):
        g.sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_alone_gives_the_same_gradients(decoder):
    expected = step(decoder, tokens()).gradients
    decoder.zero_grad()
    decoder(tokens(), labels=tokens()).loss.backward(create_graph=True)
    assert all(torch.equal(p.grad, expected[n]) for n, p in decoder.named_parameters())
    decoder.zero_grad()  # breaks the cycle that create_graph makes


def test_no_grad_saves_nothing_and_stores_nothing_for_the_backward(decoder):
    packed = []
    with saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x), torch.no_grad():
        out = decoder(tokens())
    assert not packed
    assert not out.logits.requires_grad
    decoder.requires_grad_(False)
    assert torch.equal(decoder(tokens()).logits, out.logits)


@pytest.mark.parametrize("reduce", [torch.sum, lambda x: x[:, ::2, 1::3].pow(2).mean()])
def test_gradients_from_logits_of_any_layout(reduce):
    model, ids = make(dtype=torch.float64), tokens()
    reduce(Decoder.from_hf(model)(ids).logits).backward()
    ours = gradients(model)
    model.zero_grad()
    reduce(model(ids, use_cache=False).logits).backward()
    for name, g in gradients(model).items():
        assert norm(ours[name] - g) <= 1e-5 * norm(g), name  # transformers' norms are fp32


def test_incoming_gradients_are_not_written(decoder):
    out = decoder(tokens())
    seen = []
    out.logits.register_hook(lambda g: seen.append((g, g.clone())))
    d = torch.randn(out.logits.shape)
    before = d.clone()
    out.logits.backward(d)
    assert torch.equal(d, before)
    assert all(torch.equal(g, copy) for g, copy in seen)


def test_hooks_on_parameters_fire(decoder):
    weight = decoder.model.layers[0].mlp.gate_proj.weight
    expected = step(decoder, tokens()).gradients["model.layers.0.mlp.gate_proj.weight"]
    after = []
    weight.register_hook(lambda g: 2 * g)
    weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    step(decoder, tokens())
    assert torch.equal(after[0], 2 * expected)


def test_hooks_on_the_embedding_and_the_decoder_fire(decoder):
    calls = []
    decoder.register_forward_hook(lambda *_: calls.append("decoder"))
    decoder.model.embed_tokens.register_forward_hook(lambda *_: calls.append("embedding"))
    step(decoder, tokens())
    assert calls == ["embedding", "decoder"]


def test_logits_changed_in_place_are_seen_by_autograd():
    model, ids = make(dtype=torch.float64), tokens()
    runs = []
    for _ in range(2):
        model.zero_grad()
        logits = Decoder.from_hf(model)(ids).logits
        (logits.mul_(0.5) if not runs else logits * 0.5).logsumexp(-1).sum().backward()
        runs.append(gradients(model))
    assert all(torch.equal(g, runs[1][name]) for name, g in runs[0].items())


# ------------------------------------------------------------------------------ checkpointing
def test_a_checkpointed_call_gives_the_same_gradients(decoder):
    expected = step(decoder, tokens()).gradients
    decoder.zero_grad()
    checkpoint(decoder, tokens(), labels=tokens(), use_reentrant=False).loss.backward()
    assert all(torch.equal(p.grad, expected[n]) for n, p in decoder.named_parameters())


def kept(decoder: Decoder) -> int:
    """Bytes saved for the backward of one call, weights included."""
    storages = {}
    with saved_tensors_hooks(lambda x: storages.setdefault(x.data_ptr(), x), lambda x: x):
        decoder(tokens(4, 60), labels=tokens(4, 60))
    return sum(x.nbytes for x in storages.values())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
def test_gradient_checkpointing_as_the_model_says():
    model, ids = make(num_hidden_layers=3), tokens()
    decoder = Decoder.from_hf(model)
    expected, bytes_kept = step(decoder, ids).gradients, kept(decoder)
    model.gradient_checkpointing_enable()
    model.train()
    assert kept(decoder) < 0.6 * bytes_kept
    with Launches() as launches:
        found = step(decoder, ids).gradients
    assert all(torch.equal(g, found[name]) for name, g in expected.items())
    # Forward, backward, head; and forward again, but for the first q, k and v.
    assert launches.count["gemm"] == 3 * (4 + 8) + 3 + 3 * 4 - 1
    model.eval()
    assert kept(decoder) == bytes_kept


def test_the_loss_alone_reaches_every_parameter():
    model, ids = make("qwen2"), tokens()
    assert set(step(Decoder.from_hf(model), ids).gradients) == set(exact(model, ids).gradients)
