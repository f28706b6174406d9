"""Several processes: DDP and FSDP2 around compiled blocks; sharded parameters are refused."""

from __future__ import annotations

import copy
import os
import socket

import capture_models
import pytest
import torch
from torch import distributed, nn
from torch.multiprocessing import spawn

import codetta
from codetta import errors

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="no torch.distributed")


def _port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _join(rank, port, world):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=world)


def _whole_batch():
    return capture_models.batch("llama", rows=4)


def _expected():
    model = capture_models.make("llama")
    model(**_whole_batch()).loss.backward()
    return {n: p.grad for n, p in model.named_parameters()}


def _part(rank):
    whole = _whole_batch()
    return {k: v[2 * rank : 2 * rank + 2] if isinstance(v, torch.Tensor) else v
            for k, v in whole.items()}  # fmt: skip


def _compare(found):
    for name, expected in _expected().items():
        error = (found[name] - expected).norm() / expected.norm().clamp_min(1e-3)
        assert error < 1e-5, f"{name}: {error}"


def _ddp(rank, port, pack):
    _join(rank, port, 2)
    model = capture_models.make("llama")
    compiled = codetta.compile(nn.parallel.DistributedDataParallel(model), pack=pack)
    compiled(**_part(rank)).loss.backward()
    _compare({n: p.grad for n, p in model.named_parameters()})
    assert sum(len(r.calls) for r in compiled.codetta_compiler.rewritten) >= 3
    packs = [p for r in compiled.codetta_compiler.rewritten for p in r.packs]
    assert len(packs) == (4 if pack else 0) and not any(p.reason for p in packs)
    distributed.destroy_process_group()


def _fsdp(rank, port):
    from torch.distributed.fsdp import fully_shard

    _join(rank, port, 2)
    model = capture_models.make("llama")
    compilers = []
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        layer.forward = codetta.compile(layer.forward)
        compilers.append(layer.forward.codetta_compiler)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(**_part(rank)).loss.backward()
    _compare({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    assert all(sum(len(r.calls) for r in c.rewritten) >= 2 for c in compilers)
    with pytest.raises(errors.ShardedParameters, match="DTensor"):
        codetta.compile(model)
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("pack", [False, True])
def test_ddp_has_the_gradients_of_the_whole_batch(pack):
    spawn(_ddp, (_port(), pack), nprocs=2)


@pytest.mark.slow
def test_fsdp2_around_compiled_layers_has_the_gradients_of_the_whole_batch():
    spawn(_fsdp, (_port(),), nprocs=2)


@pytest.fixture
def mesh():
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port())}
    distributed.init_process_group("gloo", rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_sharded_parameters_are_refused(mesh):
    from torch.distributed.tensor import distribute_module

    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    codetta.compile(plain)
    distribute_module(model, mesh)
    with pytest.raises(errors.ShardedParameters, match=r"4 tensors .* DTensors"):
        codetta.compile(model)


def test_a_function_of_a_sharded_model_is_refused_when_it_runs(mesh):
    from torch.distributed.tensor import distribute_module

    torch._dynamo.reset()
    model = distribute_module(nn.Linear(8, 8), mesh)
    step = codetta.compile(lambda x: model(x))
    with pytest.raises(Exception, match="tensors of this model are DTensors"):
        step(torch.distributed.tensor.distribute_tensor(torch.randn(3, 8), mesh))
