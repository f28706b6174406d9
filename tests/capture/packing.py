"""Shared by the tests of ``pack=True``: a pair of models, pair layouts, and what a run packs."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import capture_models
import pytest
import torch

import codetta
from codetta.backends.calls import REFERENCE
from codetta.backends.cuda.launch import CudaBackend
from codetta.capture.call import RegionCall
from codetta.nn.block import ADJACENT, HALVES

#: Rows of gate and up: one weight's after the other's on the reference, in turn on a GPU.
LAYOUTS = [HALVES, ADJACENT]
each_layout = pytest.mark.parametrize("pairs", LAYOUTS)


@contextmanager
def laid_out(pairs):
    """Regions run in this pair layout, whatever the backend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            RegionCall, "layout", lambda call, fused: HALVES if call.fault(pairs) else pairs
        )
        yield


def pair(name="llama", dtype=torch.float32, **changes):
    """A model and its copy."""
    model = capture_models.make(name, dtype, **changes)
    return model, copy.deepcopy(model)


def step(model, batch):
    """Loss and gradients of one step; gradients are cleared before."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss


def compiled_pair(name="llama", dtype=torch.float32, **changes):
    """(model, compiled with pack=False), (its copy, compiled with pack=True)."""
    model, twin = pair(name, dtype, **changes)
    return (model, codetta.compile(model)), (twin, codetta.compile(twin, pack=True))


def packed(compiled):
    """Names of what was packed in the last graph, without their layers."""
    packs = compiled.codetta_compiler.rewritten[-1].packs
    return {tuple(n.split(".")[-2] for n in p.names) for p in packs if not p.reason}


def kept(compiled):
    """The same of what was not, with the reason."""
    packs = compiled.codetta_compiler.rewritten[-1].packs
    return {tuple(n.split(".")[-2] for n in p.names): p.reason for p in packs if p.reason}


def packings(run):
    """How many preparations of weights a call runs, and of these how many only move rows.

    Counted where the backends run them: Dynamo does not run its code under a dispatch mode.
    """
    plans, running = [], []
    with pytest.MonkeyPatch.context() as patch:
        for backend in (type(REFERENCE), CudaBackend):
            patch.setattr(backend, "prepare", _counting(backend.prepare, plans, running))
        run()
    weights = [p for p in plans if p.name != "rows_apart"]  # that one is of gradients
    return len(weights), sum(all(n.op != "mul" for n in plan.nodes) for plan in weights)


def _counting(original, plans, running):
    def prepare(backend, plan, weights):
        if not running:  # the emulated backend asks the reference
            plans.append(plan)
        running.append(plan)
        try:
            return original(backend, plan, weights)
        finally:
            running.pop()

    return prepare


def same(model, twin):
    """Parameters and gradients are equal, bit by bit."""
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


def storages(*parameters):
    return {p.untyped_storage().data_ptr() for p in parameters}


def mlp(model, layer=0):
    found = model.model.layers[layer].mlp
    return found.gate_proj.weight, found.up_proj.weight


def attention(model, layer=0):
    found = model.model.layers[layer].self_attn
    return found.q_proj.weight, found.k_proj.weight, found.v_proj.weight
