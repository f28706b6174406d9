"""``pack=True`` while training: optimizers, accumulation, clipping, checkpoints, LoRA, DDP."""

from __future__ import annotations

import copy
import os

import capture_models
import pytest
import torch
from packing import compiled_pair, each_layout, laid_out, mlp, packed, pair, same, step, storages
from test_distributed import _port
from torch import distributed, nn

import codetta
from codetta import errors
from codetta.capture import pack

BATCH = capture_models.batch("llama")
OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def frozen(model, wanted):
    for name, p in model.named_parameters():
        p.requires_grad_(wanted(name))


@each_layout
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_take_the_same_steps(name, pairs):
    with laid_out(pairs):
        sides = compiled_pair()
        optimizers = [OPTIMIZERS[name](m.parameters()) for m, _ in sides]
        for _ in range(3):
            losses = [step(compiled, BATCH) for _, compiled in sides]
            for optimizer in optimizers:
                optimizer.step()
            assert torch.equal(*losses)
        (model, _), (twin, _) = sides
        same(model, twin)
        assert len(storages(*mlp(twin))) == 1
        assert all(p.grad.is_contiguous() for p in twin.parameters())


def test_a_fused_optimizer_takes_the_same_steps_where_weights_stay_contiguous():
    sides = compiled_pair()
    for model, compiled in sides:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for _ in range(3):
            step(compiled, BATCH)
            optimizer.step()
    assert packed(sides[1][1])
    same(sides[0][0], sides[1][0])


@each_layout
def test_accumulation_and_clipping(pairs):
    with laid_out(pairs):
        sides = compiled_pair()
        norms = []
        for model, compiled in sides:
            for rows in (1, 2, 3):
                batch = capture_models.batch("llama", rows=2)
                compiled(**batch).loss.div(rows).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    assert torch.equal(*norms)
    same(sides[0][0], sides[1][0])


@each_layout
def test_frozen_weights(pairs):
    with laid_out(pairs):
        (model, plain), (twin, ours) = compiled_pair()
        for m in (model, twin):
            frozen(m, lambda name: "norm" in name or "up_proj" in name)
        assert torch.equal(step(plain, BATCH), step(ours, BATCH))
        same(model, twin)
        gate, up = mlp(twin)
        assert len(storages(gate, up)) == 1
        assert (gate.requires_grad, up.requires_grad) == (False, True)


@each_layout
def test_activation_checkpointing(pairs):
    with laid_out(pairs):
        (model, plain), (twin, ours) = compiled_pair()
        for m in (model, twin):
            m.gradient_checkpointing_enable({"use_reentrant": False})
        assert torch.equal(step(plain, BATCH), step(ours, BATCH))
        same(model, twin)
        assert ("gate_proj", "up_proj") in packed(ours)
        assert len(storages(*mlp(twin))) == 1


@each_layout
def test_lora_trains_its_adapters_alone(pairs):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "gate_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(capture_models.make("llama"), config)
    twin = copy.deepcopy(model)
    with laid_out(pairs):
        plain, ours = codetta.compile(model), codetta.compile(twin, pack=True)
        for _ in range(2):
            assert torch.equal(step(plain, BATCH), step(ours, BATCH))
        same(model, twin)
    trained = [n for n, p in twin.named_parameters() if p.grad is not None]
    assert trained and all("lora_" in n for n in trained)
    found, expected = (peft.get_peft_model_state_dict(m) for m in (twin, model))
    assert all(torch.equal(found[n], x) for n, x in expected.items())


@each_layout
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_backends_and_a_loss_without_logits(backend, pairs):
    model, twin = pair()
    options = {"backend": backend, "logits": "none", "fullgraph": True}
    with laid_out(pairs):
        plain = codetta.compile(model, **options)
        ours = codetta.compile(twin, pack=True, **options)
        for _ in range(2):
            assert torch.equal(step(plain, BATCH), step(ours, BATCH))
        same(model, twin)
        assert packed(ours)


# --------------------------------------------------------------------------- several processes
@pytest.fixture
def mesh():
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port())}
    distributed.init_process_group("gloo", rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@each_layout
def test_ddp(mesh, pairs):
    model, twin = pair()
    with laid_out(pairs):
        plain = codetta.compile(model)
        ours = codetta.compile(nn.parallel.DistributedDataParallel(twin), pack=True)
        for _ in range(2):
            assert torch.equal(step(plain, BATCH), step(ours, BATCH))
        same(model, twin)
        assert ("gate_proj", "up_proj") in packed(ours)
    found = twin.state_dict()
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in found.values())


@pytest.mark.parametrize("cut", [True, False])
def test_ddp_with_several_buckets_packs_if_the_graph_is_not_cut_at_them(mesh, cut):
    model, twin = pair(hidden_size=128, intermediate_size=640, vocab_size=4096)
    with laid_out("adjacent"), torch._dynamo.config.patch(optimize_ddp=cut):
        plain = codetta.compile(model)
        ddp = nn.parallel.DistributedDataParallel(twin, bucket_cap_mb=1)
        ours = codetta.compile(ddp, pack=True)
        for _ in range(2):
            assert torch.equal(step(plain, BATCH), step(ours, BATCH))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)
    packs = [p for r in ours.codetta_compiler.rewritten for p in r.packs]
    assert {p.reason for p in packs} == {pack.ROTATED, pack.CUT if cut else ""}
    assert len(storages(*mlp(twin))) == (2 if cut else 1)


def test_sharded_parameters_are_refused_before_anything_changes(mesh):
    from torch.distributed.fsdp import fully_shard

    model, twin = pair()
    fully_shard(model, mesh=mesh)
    with pytest.raises(errors.PackSharded, match="fully_shard"):
        codetta.compile(model, pack=True)
    with pytest.raises(errors.PackSharded, match=r"lm_head.*DTensor"):
        distributed.tensor.distribute_module(twin.lm_head, mesh)
        codetta.compile(twin, pack=True)


def test_a_block_that_is_sharded_after_it_was_compiled_is_refused(mesh):
    from torch.distributed.fsdp import fully_shard

    model, _ = pair()
    for layer in model.model.layers:
        layer.forward = codetta.compile(layer.forward, pack=True)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(Exception, match=r"cannot lay out sharded parameters .*fully_shard"):
        model(**BATCH)


def test_blocks_under_a_sharded_model_are_left_alone(mesh):
    """Their weights are gathered for one forward; FSDP2 decides where."""
    from torch.distributed.fsdp import fully_shard

    model, twin = pair()
    for layer in model.model.layers:
        layer.forward = codetta.compile(layer.forward, pack=True)
    fully_shard(model, mesh=mesh)
    step(model, BATCH)
    for layer in model.model.layers:
        packs = [p for r in layer.forward.codetta_compiler.rewritten for p in r.packs]
        assert packs and all(p.reason for p in packs)
    step(twin, BATCH)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-6)
