"""What a call may be given: labels, masks, positions, shapes, dtypes; equal to Hugging Face's."""

from __future__ import annotations

import pytest
import torch
from decoder_models import VOCABULARY, exact, make, step, tokens
from helpers.budget import norm

from codetta.errors import AutocastUnsupported, BadRank, UnsupportedModel
from codetta.nn import Decoder

F64 = torch.float64


def assert_equal(ours, theirs, ref_dtype=F64) -> None:
    tolerance = 1e-10 if ref_dtype == F64 else 1e-5
    largest = max(norm(g) for g in theirs.gradients.values())
    torch.testing.assert_close(ours.loss.double(), theirs.loss.double(), rtol=1e-5, atol=tolerance)
    for name, g in theirs.gradients.items():
        assert norm(ours.gradients[name] - g) <= tolerance * max(norm(g), 1e-3 * largest), name


# ------------------------------------------------------------------------------- labels
def test_ignored_labels():
    model, ids = make(dtype=F64), tokens()
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.manual_seed(3)) < 0.6, -100)
    assert_equal(step(Decoder.from_hf(model), ids, labels), exact(model, ids, labels))


def test_all_labels_ignored():
    model, ids = make(), tokens()
    decoder, labels = Decoder.from_hf(model), torch.full_like(ids, -100)
    assert decoder(ids, labels=labels).loss.isnan()  # as in transformers: a mean of nothing
    out = step(decoder, ids, labels, num_items_in_batch=7)
    assert out.loss == 0
    assert all((g == 0).all() for g in out.gradients.values())


@pytest.mark.parametrize("as_tensor", [False, True])
def test_two_unequal_micro_batches_equal_one_batch(as_tensor):
    model, ids = make(dtype=F64), tokens(3, 9)
    labels = ids.clone()
    labels[0, :6] = -100
    items = (labels[:, 1:] != -100).sum()
    whole = step(Decoder.from_hf(model), ids, labels)
    decoder = Decoder.from_hf(model)
    decoder.zero_grad()
    for part in (slice(0, 1), slice(1, 3)):
        count = items if as_tensor else int(items)
        decoder(ids[part], labels=labels[part], num_items_in_batch=count).loss.backward()
    for name, p in decoder.named_parameters():
        assert norm(p.grad - whole.gradients[name]) <= 1e-12 * norm(p.grad), name


def test_num_items_in_batch_is_transformers():
    model, ids = make(), tokens()
    items = torch.tensor(5)
    ours, theirs = (step(m, ids, num_items_in_batch=items) for m in (Decoder.from_hf(model), model))
    assert_equal(ours, theirs, torch.float32)


def test_logits_without_labels():
    out = Decoder.from_hf(make())(tokens())
    assert out.loss is None
    assert out.logits.shape == (2, 9, VOCABULARY)


# -------------------------------------------------------------------------------- masks
PADDED = {
    "right": [[1] * 9, [1] * 5 + [0] * 4],
    "left": [[0] * 3 + [1] * 6, [1] * 9],
    "both": [[0] * 2 + [1] * 5 + [0] * 2, [1] * 9],
    "none": [[1] * 9] * 2,
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("side", PADDED)
def test_padding(side, family):
    model, ids, mask = make(family, F64), tokens(), torch.tensor(PADDED[side])
    labels = ids.masked_fill(mask == 0, -100)
    ours = step(Decoder.from_hf(model), ids, labels, attention_mask=mask)
    theirs = exact(model, ids, labels, attention_mask=mask)
    seen = mask.bool()
    assert norm((ours.logits - theirs.logits)[seen]) <= 1e-10 * norm(theirs.logits)
    assert_equal(ours, theirs)


def test_what_is_padded_does_not_matter():
    model, ids, mask = make(), tokens(), torch.tensor(PADDED["both"])
    decoder, other = Decoder.from_hf(model), tokens(seed=5)
    other = torch.where(mask.bool(), ids, other)
    ours, theirs = (decoder(x, attention_mask=mask).logits for x in (ids, other))
    assert torch.equal(ours[mask.bool()], theirs[mask.bool()])


@pytest.mark.parametrize(
    "positions",
    [
        torch.arange(9)[None],
        torch.arange(9)[None] + 11,
        torch.stack((torch.arange(9), torch.arange(9) + 20)),
        torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]] * 2),  # packed: 4, 2 and 3 tokens
    ],
    ids=["plain", "shifted", "each its own", "packed"],
)
def test_positions(positions):
    model, ids = make(dtype=F64), tokens()
    ours = step(Decoder.from_hf(model), ids, position_ids=positions)
    assert_equal(ours, exact(model, ids, position_ids=positions))


def test_packed_sequences_do_not_see_each_other():
    decoder, ids = Decoder.from_hf(make(dtype=F64)), tokens(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = decoder(ids, position_ids=positions).logits
    apart = torch.cat((decoder(ids[:, :4]).logits, decoder(ids[:, 4:]).logits), dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------ shapes and dtypes
@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_empty_batches(shape):
    out = Decoder.from_hf(make())(torch.zeros(shape, dtype=torch.long))
    assert out.logits.shape == (*shape, VOCABULARY)


def test_tokens_that_are_not_contiguous():
    decoder, ids = Decoder.from_hf(make()), tokens(9, 2)
    assert torch.equal(decoder(ids.t()).logits, decoder(ids.t().contiguous()).logits)


@pytest.mark.parametrize("name", ["input_ids", "labels", "attention_mask", "position_ids"])
def test_a_wrong_shape_is_named(name):
    inputs = {"input_ids": tokens(), name: tokens(2, 8) if name != "input_ids" else tokens()[0]}
    with pytest.raises(BadRank, match=name):
        Decoder.from_hf(make())(**inputs)


def test_eval_mode_and_inference_mode_change_nothing():
    decoder, ids = Decoder.from_hf(make()), tokens()
    expected = decoder(ids).logits
    with torch.inference_mode():
        assert torch.equal(decoder.eval()(ids).logits, expected)


def test_autocast_is_refused():
    decoder = Decoder.from_hf(make())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(AutocastUnsupported, match="bfloat16"),
    ):
        decoder(tokens())


def test_mixed_dtypes_are_refused_by_name():
    model = make(dtype=torch.bfloat16)
    decoder = Decoder.from_hf(model)
    model.model.norm.float()
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight is torch\.float32"):
        decoder(tokens())
