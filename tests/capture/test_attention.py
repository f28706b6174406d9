"""A mask that is proved causal is replaced by is_causal=True; any other is kept."""

from __future__ import annotations

import copy

import capture_models
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import codetta

CAUSAL = "is causal: replaced by is_causal=True"


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def notes(compiled):
    return [note for r in compiled.codetta_compiler.rewritten for note in r.attention]


class Attention(nn.Module):
    """Attention on (batch, tokens, 32) with a mask from a function of the tokens' number."""

    def __init__(self, mask):
        super().__init__()
        self.qkv, self.mask = nn.Linear(32, 96), mask

    def forward(self, x, *extra):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, 4, 8).transpose(1, 2) for y in self.qkv(x).split(32, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(t, *extra))
        return y.transpose(1, 2).reshape(b, t, 32)


def lower(t):
    i = torch.arange(t)
    return (i[None, :] <= i[:, None])[None, None]


def strictly_lower_from(t):
    i = torch.arange(t)
    return (i[None, :] <= i[:, None] + 1)[None, None]


def window(t):
    i = torch.arange(t)
    distance = i[:, None] - i[None, :]
    return (distance >= 0) & (distance < 4)


def upper(t):
    i = torch.arange(t)
    return i[None, :] >= i[:, None]


def written(t):
    mask = lower(t).clone()
    mask[..., 2, 0] = False
    return mask


def added(t):
    return torch.zeros(t, t).masked_fill(~lower(t)[0, 0], -torch.inf)


def two_heads(t):
    return torch.cat((lower(t).expand(1, 2, t, t), torch.ones(1, 2, t, t, dtype=torch.bool)), 1)


def run(mask, *extra, dynamic=False):
    torch.manual_seed(0)
    model, x = Attention(mask), torch.randn(2, 7, 32)
    compiled = codetta.compile(model, fullgraph=True)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1)
    torch.testing.assert_close(compiled(x, *extra), model(x, *extra))
    return notes(compiled)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_causal_mask_is_replaced(dynamic):
    (note,) = run(lower, dynamic=dynamic)
    assert note.endswith(CAUSAL)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("mask", [strictly_lower_from, window, upper, written, added, two_heads])
def test_any_other_mask_is_kept(mask, dynamic):
    (note,) = run(mask, dynamic=dynamic)
    assert "is kept: " in note


def test_a_window_that_holds_all_tokens_is_causal():
    (note,) = run(lambda t: window(t) | (lower(t) & (t < 9)))
    assert note.endswith(CAUSAL)


def test_a_mask_that_is_an_input_is_kept():
    (note,) = run(lambda t, given: given, lower(7))
    assert "it depends on an input" in note


def test_a_mask_that_depends_on_an_input_is_kept():
    (note,) = run(lambda t, keep: lower(t) & keep, torch.ones(7, dtype=torch.bool))
    assert "it depends on an input" in note


@pytest.mark.parametrize("tokens", [6, 1300])
def test_a_model_without_padding_gets_its_causal_attention_back(tokens):
    model = capture_models.make("llama", max_position_embeddings=2048)
    compiled = codetta.compile(model, fullgraph=True)
    batch = capture_models.batch("llama", tokens=tokens)
    torch.testing.assert_close(compiled(**batch).loss, model(**batch).loss)
    assert [n.endswith(CAUSAL) for n in notes(compiled)] == [True]


def test_of_unknown_length_too():
    model = capture_models.make("llama")
    compiled = codetta.compile(model, fullgraph=True)
    batch = capture_models.batch("llama", tokens=9)
    torch._dynamo.mark_dynamic(batch["input_ids"], 1)
    torch.testing.assert_close(compiled(**batch).loss, model(**batch).loss)
    assert [n.endswith(CAUSAL) for n in notes(compiled)] == [True]


def test_inside_checkpointed_layers_too():
    model = capture_models.make("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    compiled = codetta.compile(model, fullgraph=True)
    batch = capture_models.batch("llama")
    torch.testing.assert_close(compiled(**batch).loss, model(**batch).loss)
    assert [n.endswith(CAUSAL) for n in notes(compiled)] == [True, True]


def test_a_sliding_window_is_kept():
    model = capture_models.make("mistral_window")
    compiled = codetta.compile(model, fullgraph=True)
    batch = capture_models.batch("mistral_window", tokens=9)
    torch.testing.assert_close(compiled(**batch).loss, model(**batch).loss)
    assert ["it is not the causal mask" in n for n in notes(compiled)] == [True]


def test_packed_sequences_are_kept():
    model = capture_models.make("llama")
    compiled = codetta.compile(model, fullgraph=True)
    batch = capture_models.batch("llama", tokens=8)
    batch["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).expand(2, -1)
    torch.testing.assert_close(compiled(**batch).loss, model(**batch).loss)
    assert ["it depends on an input" in n for n in notes(compiled)] == [True]


# ------------------------------------------------------------------------------ shared heads
class Grouped(nn.Module):
    """Attention of 4 query heads over 2 heads of keys and values, repeated by ``repeat``."""

    def __init__(self, repeat, masked=True):
        super().__init__()
        self.q, self.kv = nn.Linear(32, 32), nn.Linear(32, 32)
        self.repeat, self.masked = repeat, masked

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 4, 8).transpose(1, 2)
        k, v = (y.view(b, t, 2, 8).transpose(1, 2) for y in self.kv(x).split(16, -1))
        mask = lower(t).to(x.device) if self.masked else None
        y = F.scaled_dot_product_attention(
            q, self.repeat(k), self.repeat(v), attn_mask=mask, is_causal=not self.masked
        )
        return y.transpose(1, 2).reshape(b, t, 32)


def interleaved(x):
    b, h, t, d = x.shape
    return x[:, :, None, :, :].expand(b, h, 2, t, d).reshape(b, 2 * h, t, d)


def tiled(x):
    """The heads in another order: 0 1 0 1, not 0 0 1 1."""
    b, h, t, d = x.shape
    return x[:, None].expand(b, 2, h, t, d).reshape(b, 2 * h, t, d)


def changed(x):
    b, h, t, d = x.shape
    return (x[:, :, None].expand(b, h, 2, t, d) * 2.0).reshape(b, 2 * h, t, d)


def run_grouped(repeat, dtype=torch.bfloat16, masked=True, dynamic=False):
    torch.manual_seed(0)
    model, x = Grouped(repeat, masked).to(dtype), torch.randn(2, 7, 32, dtype=dtype)
    twin = copy.deepcopy(model)
    compiled = codetta.compile(model, fullgraph=True)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1)
    found, stock = compiled(x), twin(x)
    slack = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(found, stock, **slack)
    cotangent = torch.randn_like(stock)
    found.backward(cotangent)
    stock.backward(cotangent)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **slack)
    return [n for n in notes(compiled) if "enable_gqa" in n]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_repeated_heads_are_shared(masked, dynamic):
    (note,) = run_grouped(interleaved, masked=masked, dynamic=dynamic)
    assert "1 attention(s) are not repeated from 2 to 4 heads" in note


@pytest.mark.parametrize("repeat", [tiled, changed])
def test_other_heads_are_left_as_they_are(repeat):
    assert run_grouped(repeat) == []


def test_fp32_has_no_kernel_for_shared_heads():
    assert run_grouped(interleaved, torch.float32) == []


def test_heads_that_are_broadcast_too_are_left_as_they_are():
    from types import SimpleNamespace

    from codetta.capture.grouped import _fits

    def heads(n):
        return torch.empty(2, n, 7, 8, dtype=torch.bfloat16)

    assert _fits(heads(4), heads(2), heads(2), [heads(4), heads(4)])
    assert not _fits(heads(1), heads(2), heads(2), [heads(4), heads(4)])
    assert not _fits(SimpleNamespace(), heads(2), heads(2), [heads(4), heads(4)])
