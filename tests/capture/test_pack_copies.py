"""A packed model is saved, copied, moved and loaded like any other."""

from __future__ import annotations

import copy
import io
import pickle

import capture_models
import pytest
import torch
from packing import (
    attention,
    compiled_pair,
    each_layout,
    laid_out,
    mlp,
    packed,
    packings,
    step,
    storages,
)

import codetta

BATCH = capture_models.batch("llama")


@pytest.fixture(params=["halves", "adjacent"])
def models(request):
    """A model, and its copy that was packed in one step, compiled."""
    torch._dynamo.reset()
    with laid_out(request.param):
        (model, _), (twin, ours) = compiled_pair()
        step(ours, BATCH)
        yield model, twin, ours


def is_its_own(x):
    return x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes


def equal(found, model):
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


def test_state_dict_has_tensors_with_memory_of_their_own(models):
    model, twin, _ = models
    assert not is_its_own(mlp(twin)[0])
    for holder, of in ((twin, model), (twin.model.layers[0].mlp, model.model.layers[0].mlp)):
        found = holder.state_dict()
        equal(found, of)
        assert all(map(is_its_own, found.values()))
    kept = twin.state_dict(keep_vars=True)
    assert kept["model.layers.0.mlp.up_proj.weight"] is mlp(twin)[1]


def test_save_pretrained_and_back(models, tmp_path):
    model, twin, _ = models
    twin.save_pretrained(tmp_path)
    equal(type(model).from_pretrained(tmp_path).state_dict(), model)


def test_torch_save_of_a_state_dict_stores_each_weight_once(models):
    model, twin, _ = models
    sizes = []
    for m in (model, twin):
        file = io.BytesIO()
        torch.save(m.state_dict(), file)
        sizes.append(file.tell())
    file.seek(0)
    equal(torch.load(file), model)
    assert sizes[0] == sizes[1]


def test_a_deep_copy_is_independent(models):
    model, twin, _ = models
    other = copy.deepcopy(twin)
    equal(other.state_dict(), model)
    assert not storages(*other.parameters()) & storages(*twin.parameters())
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    equal(twin.state_dict(), model)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_pickled_model_is_independent_and_saves_like_the_packed_one(models, how, tmp_path):
    model, twin, _ = models
    if how == "pickle":
        other = pickle.loads(pickle.dumps(twin))
    else:
        file = io.BytesIO()
        torch.save(twin, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert not storages(*other.parameters()) & storages(*twin.parameters())
    other.save_pretrained(tmp_path)
    equal(type(model).from_pretrained(tmp_path).state_dict(), model)


def test_another_dtype_is_packed_anew(models):
    _, twin, ours = models
    first = packed(ours)
    twin.to(torch.bfloat16)
    assert len(storages(*mlp(twin))) == 2
    step(ours, BATCH)
    assert packed(ours) == first
    assert len(storages(*mlp(twin))) == 1
    assert all(p.dtype == p.grad.dtype == torch.bfloat16 for p in twin.parameters())


def test_a_loaded_state_dict_keeps_the_layout(models):
    model, twin, ours = models
    before = [(p.data_ptr(), p.stride()) for p in twin.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    twin.load_state_dict(model.state_dict())
    assert [(p.data_ptr(), p.stride()) for p in twin.parameters()] == before
    equal(twin.state_dict(), model)
    torch.testing.assert_close(step(ours, BATCH), step(model, BATCH))


def test_assigned_weights_are_packed_by_the_kernel_again(models):
    model, twin, ours = models
    quiet = packings(lambda: step(ours, BATCH))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    twin.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    torch.testing.assert_close(step(ours, BATCH), step(model, BATCH))
    assert packings(lambda: step(ours, BATCH)) > quiet
    with torch.no_grad():
        for p in twin.parameters():  # what is read is what is there now
            p.zero_()
    assert step(ours, BATCH).isfinite() and mlp(twin)[0].grad.count_nonzero() == 0


@each_layout
def test_the_uncompiled_model_computes_the_same_from_packed_weights(pairs):
    torch._dynamo.reset()
    with laid_out(pairs):
        (model, _), (twin, ours) = compiled_pair()
        step(ours, BATCH)
    torch.testing.assert_close(step(twin, BATCH), step(model, BATCH), rtol=1e-6, atol=0)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-6)
    assert len(storages(*attention(twin))) == (1 if pairs == "halves" else 3)


def test_the_model_can_be_compiled_twice(models):
    _, twin, ours = models
    again = codetta.compile(twin, pack=True)
    assert torch.equal(step(again, BATCH), step(ours, BATCH))
    assert packed(again) == packed(ours)
