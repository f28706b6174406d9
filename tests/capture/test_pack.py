"""``pack=True``: which weights become views of one storage, and that nothing else changes."""

from __future__ import annotations

import copy

import capture_models
import pytest
import torch
from helpers.fused import running
from packing import (
    attention,
    compiled_pair,
    each_layout,
    kept,
    laid_out,
    mlp,
    packed,
    packings,
    pair,
    same,
    step,
    storages,
)
from torch import nn

import codetta
from codetta import errors
from codetta.capture import pack
from codetta.nn.block import ADJACENT, HALVES
from codetta.plan.sides import Side, Sides

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@each_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_those_without_bit_by_bit(pairs, dtype):
    batch = capture_models.batch("llama")
    with laid_out(pairs):
        (model, plain), (twin, ours) = compiled_pair(dtype=dtype)
        for _ in range(2):
            assert torch.equal(step(plain, batch), step(ours, batch))
            same(model, twin)
        assert GATE_UP in packed(ours)


class Gated(nn.Module):
    """A norm and a gated MLP, which compute in the dtype of their weights."""

    def __init__(self):
        super().__init__()
        self.norm, self.down = nn.RMSNorm(16), nn.Linear(24, 16, bias=False)
        self.gate, self.up = (nn.Linear(16, 24, bias=False) for _ in range(2))

    def forward(self, x):
        h = self.norm(x)
        return self.down(nn.functional.silu(self.gate(h)) * self.up(h))


@each_layout
def test_in_fp64_nothing_but_rounding_tells_it_from_the_uncompiled_module(pairs):
    torch.manual_seed(0)
    model = Gated().double()
    twin, x = copy.deepcopy(model), torch.randn(6, 16, dtype=torch.float64)
    with laid_out(pairs):
        ours = codetta.compile(twin, pack=True)
        for _ in range(2):
            torch.testing.assert_close(ours(x), model(x), rtol=1e-12, atol=1e-12)
            ours(x).square().sum().backward()
            model(x).square().sum().backward()
    assert len(storages(twin.gate.weight, twin.up.weight)) == 1
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-12, atol=1e-12)


@each_layout
def test_weights_that_are_packed_share_a_storage_in_the_order_of_their_rows(pairs):
    (_, _), (twin, ours) = compiled_pair()
    with laid_out(pairs):
        step(ours, capture_models.batch("llama"))
    gate, up = mlp(twin)
    whole = torch.cat((gate, up)) if pairs == HALVES else torch.stack((gate, up), 1).flatten(0, 1)
    memory = torch.empty(0).set_(gate.untyped_storage())
    assert len(storages(gate, up)) == 1
    assert torch.equal(memory, whole.detach().flatten())
    assert len(storages(*mlp(twin), *mlp(twin, 1))) == 2
    assert gate.stride() == up.stride() == ((32, 1) if pairs == HALVES else (64, 1))
    assert all(p.is_leaf and p.requires_grad and type(p) is nn.Parameter for p in (gate, up))


def test_kernels_that_only_pack_do_not_run():
    """Three folds and two packs a layer, of which the packs go."""
    batch = capture_models.batch("llama")
    (_, plain), (_, ours) = compiled_pair()
    ours(**batch)
    assert packings(lambda: step(plain, batch)) == (9, 4)
    assert packings(lambda: step(ours, batch)) == (5, 0)


def test_rows_that_a_rotation_permutes_stay_and_the_reason_is_kept():
    batch = capture_models.batch("llama")
    with laid_out(ADJACENT):
        (_, plain), (twin, ours) = compiled_pair()
        ours(**batch)
        assert packed(ours) == {GATE_UP}
        assert kept(ours) == {QKV: pack.ROTATED}
        assert len(storages(*attention(twin))) == 3
        assert packings(lambda: step(plain, batch)) == (9, 4)
        assert packings(lambda: step(ours, batch)) == (7, 2)


def test_the_fused_backend_reads_packed_weights_in_place():
    batch = capture_models.batch("llama")
    with running("emulated"):
        (model, plain), (twin, ours) = compiled_pair(dtype=torch.bfloat16)
        assert torch.equal(step(plain, batch), step(ours, batch))
        same(model, twin)
        assert packed(ours) == {GATE_UP}
        assert packings(lambda: step(plain, batch)) == (9, 4)
        assert packings(lambda: step(ours, batch)) == (7, 2)


@pytest.mark.parametrize("name", ["gpt2", "phi3", "nano_gpt"])
def test_weights_that_are_one_already_leave_nothing_to_do(name):
    (model, plain), (twin, ours) = compiled_pair(name)
    before = [p.data_ptr() for p in twin.parameters()]
    batch = capture_models.batch(name)
    assert torch.equal(step(plain, batch), step(ours, batch))
    assert ours.codetta_compiler.rewritten[-1].packs == []
    assert [p.data_ptr() for p in twin.parameters()] == before
    same(model, twin)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2", "olmo2", "titan", "bert"])
def test_other_families(name):
    batch = capture_models.batch(name)
    with laid_out(ADJACENT):
        (model, plain), (twin, ours) = compiled_pair(name)
        assert torch.equal(step(plain, batch), step(ours, batch))
        same(model, twin)
        assert packed(ours)


@each_layout
def test_one_more_trace_where_weights_moved_and_no_more_compilations(pairs):
    batch = capture_models.batch("llama")
    with laid_out(pairs):
        (_, _), (_, ours) = compiled_pair()
        traced = []
        original = pack.Packer.pack
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pack.Packer, "pack", lambda *a: traced.append(1) or original(*a))
            for _ in range(3):
                step(ours, batch)
            with torch.no_grad():
                ours(**batch)
    assert len(traced) == 3  # the second trains, the third does not
    assert len(ours.codetta_compiler.rewritten) == 2


def test_without_gradients_every_pack_is_a_fold_and_nothing_moves():
    batch = capture_models.batch("llama")
    (_, _), (twin, ours) = compiled_pair()
    with torch.inference_mode():
        ours(**batch)
    assert kept(ours) == {QKV: pack.FOLDED, GATE_UP: pack.FOLDED}
    assert len(storages(*mlp(twin))) == 2


def test_a_model_compiled_in_inference_mode_can_still_be_trained():
    model = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
    packer = pack.Packer(model)
    weights = (model["a"].weight, model["b"].weight)
    sides = Sides((Side("a", 0, 1), Side("b", 8, 1)), 16, 8)
    group = pack._Group(pack.Packed(("a.weight", "b.weight"), "", sides, "r"), weights)
    with torch.inference_mode():
        pack.lay_out(group, pack.Holders(packer.model))
    assert len(storages(*weights)) == 1
    (model["a"](torch.ones(2, 8)) * model["b"](torch.ones(2, 8))).sum().backward()
    assert weights[0].grad.norm() > 0


# -------------------------------------------------------------------------- what is left alone
def test_tied_weights_are_left_alone():
    (_, _), (twin, ours) = compiled_pair()
    for layer in twin.model.layers:
        layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight
    step(ours, capture_models.batch("llama"))
    assert packed(ours) == {QKV}
    assert mlp(twin)[0] is mlp(twin)[1]


def test_a_weight_that_another_module_holds_too_is_left_alone():
    """In a state dict both are one tensor, which separate copies would not be."""
    (_, _), (twin, ours) = compiled_pair()
    twin.other = nn.ModuleList(nn.Linear(40, 32) for _ in twin.model.layers)
    for held, layer in zip(twin.other, twin.model.layers, strict=True):
        held.weight = layer.mlp.gate_proj.weight
    step(ours, capture_models.batch("llama"))
    assert packed(ours) == {QKV}
    assert kept(ours)[GATE_UP] == "a weight of it is tied"
    found = twin.state_dict()
    assert len(storages(found["other.0.weight"], mlp(twin)[0])) == 1


def test_tied_embeddings_stay_tied():
    (model, plain), (twin, ours) = compiled_pair("llama_tied")
    batch = capture_models.batch("llama")
    assert torch.equal(step(plain, batch), step(ours, batch))
    same(model, twin)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert packed(ours) == {QKV, GATE_UP}


def test_a_weight_that_two_groups_want_otherwise_is_in_neither():
    class Crossed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))
            self.down = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            y = self.down(nn.functional.silu(self.a(x)) * self.b(x))
            return self.down(nn.functional.silu(self.b(y)) * self.c(y))

    model = Crossed()
    ours, x = codetta.compile(model, pack=True), torch.randn(6, 8, requires_grad=True)
    torch.testing.assert_close(ours(x), model(x))
    assert set(kept(ours).values()) == {pack.TORN}
    assert len(storages(*(m.weight for m in (model.a, model.b, model.c)))) == 3


@pytest.mark.parametrize("case", ["shared", "later", "narrow"])
def test_weights_that_cannot_share_a_storage_say_why(case):
    narrow = {"hidden_size": 34, "num_attention_heads": 2, "head_dim": 8}
    _, twin = pair(**(narrow if case == "narrow" else {}))
    mlps = [layer.mlp for layer in twin.model.layers]
    if case == "shared":
        for m in mlps:
            memory = torch.stack((m.gate_proj.weight.detach(), m.up_proj.weight.detach()), 1)
            m.gate_proj.weight.data, m.up_proj.weight.data = memory.unbind(1)
    ours = codetta.compile(twin, pack=True)
    if case == "later":
        for m in mlps:
            m.gate_proj.weight = nn.Parameter(m.gate_proj.weight.detach().clone())
    with laid_out(ADJACENT if case == "narrow" else HALVES):
        step(ours, capture_models.batch("llama"))
    expected = {"shared": "shares its memory", "later": "it was compiled", "narrow": "16 bytes"}
    assert expected[case] in kept(ours)[GATE_UP]


def test_under_autocast_the_casts_stay_and_nothing_moves():
    (model, plain), (twin, ours) = compiled_pair()
    batch = capture_models.batch("llama")
    with torch.autocast("cpu", torch.bfloat16):
        losses = plain(**batch).loss, ours(**batch).loss
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    same(model, twin)
    assert kept(ours) == {QKV: pack.FOLDED, GATE_UP: pack.FOLDED}


def test_a_function_is_refused_and_a_method_is_not():
    model = capture_models.make("llama")
    with pytest.raises(errors.PackNeedsModule, match="lambda"):
        codetta.compile(lambda x: model(x), pack=True)
    with pytest.raises(errors.PackNeedsModule):
        codetta.compile(pack=True)(lambda x: model(x))
    ours = codetta.compile(model.forward, pack=True)
    ours(**capture_models.batch("llama"))
    assert packed(ours) == {QKV, GATE_UP}
