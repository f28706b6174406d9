"""``codetta.compile(model, recompute=False)``: activations are kept, nothing else differs."""

from __future__ import annotations

import capture_models
import pytest
import torch
from packing import each_layout, laid_out, pair, step

import codetta
from codetta.demo.trace import KernelTrace


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@each_layout
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3"])
def test_gradients_in_fp64_are_those_of_the_uncompiled_model(pairs, name):
    model, twin = pair(name, torch.float64)
    batch = capture_models.batch(name)
    with laid_out(pairs):
        loss = step(codetta.compile(twin, recompute=False), batch)
    torch.testing.assert_close(loss, step(model, batch), rtol=1e-12, atol=0)
    for (n, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        if p.grad is None:
            assert q.grad is None, n
            continue
        assert (p.grad - q.grad).norm() <= 1e-11 * p.grad.norm().clamp(min=1e-6), n


def test_every_layer_saves_one_store_of_its_activations():
    found = {}
    for recompute in (True, False):
        _, twin = pair("llama")
        compiled = codetta.compile(twin, recompute=recompute)
        batch = capture_models.batch("llama")
        with KernelTrace(compiled=True) as trace:
            step(compiled, batch)
        found[recompute] = sum(k.bytes for k in trace.rows("programs"))
    config = capture_models.make("llama").config
    tokens = batch["input_ids"].numel()
    once = tokens * config.intermediate_size * 4
    assert found[True] - found[False] == config.num_hidden_layers * once


def test_explain_counts_it():
    found = {}
    batch = capture_models.batch("llama")
    for recompute in (True, False):
        _, twin = pair("llama")
        text = str(codetta.explain(codetta.compile(twin, recompute=recompute), **batch).to_dict())
        found[recompute] = text
        torch._dynamo.reset()
    assert found[True] != found[False]


def test_gradient_checkpointing_goes_together_with_it():
    model, twin = pair("llama")
    for m in (model, twin):
        m.gradient_checkpointing_enable({"use_reentrant": False})
    batch = capture_models.batch("llama")
    loss = step(codetta.compile(twin, recompute=False), batch)
    torch.testing.assert_close(loss, step(model, batch), rtol=1e-5, atol=0)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-5)
