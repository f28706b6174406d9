"""The layout the fused backend needs (interleaved gate and up, adjacent-pair rotation) computes the
same decoder: scores do not see the permutation, and gradients come back un-permuted."""

from __future__ import annotations

import pytest
import torch
from decoder_models import make, tokens

from codetta.nn import Decoder, decoder
from codetta.nn.block import ADJACENT, HALVES, segment


def loss_and_gradients(model):
    ids = tokens()
    model.zero_grad()
    loss = Decoder.from_hf(model)(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def test_adjacent_pairs_train_the_same_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama", torch.float64)
    loss, gradients = loss_and_gradients(model)
    used = []

    def adjacent(spec, pairs=HALVES):
        used.append(spec.part)
        return segment(spec, ADJACENT)

    monkeypatch.setattr(decoder, "segment", adjacent)
    other_loss, other = loss_and_gradients(model)
    assert set(used) == {"entry", "middle", "exit"}
    torch.testing.assert_close(other_loss, loss, rtol=1e-12, atol=0)
    for name, expected in gradients.items():
        torch.testing.assert_close(other[name], expected, rtol=1e-9, atol=1e-12, msg=name)


def test_the_adjacent_layout_rotates_adjacent_pairs_and_interleaves() -> None:
    spec = Decoder.from_hf(make("llama")).spec
    text = str(segment(spec, ADJACENT))
    assert "pairs=adjacent" in text and "pairs=halves" not in text
    assert "permute_rows" in text
    assert "pairs=halves" in str(segment(spec))
