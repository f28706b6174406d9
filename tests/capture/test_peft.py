"""LoRA as the peft library builds it: adapters are in the graph, so they are trained."""

from __future__ import annotations

import copy

import capture_models
import pytest
import torch

import codetta

peft = pytest.importorskip("peft")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_train_and_frozen_weights_do_not(dtype):
    torch.manual_seed(0)
    base = capture_models.make("llama").to(dtype)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,  # nonzero B, so that A has a gradient
    )
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    twin = copy.deepcopy(model)
    exact = copy.deepcopy(model).double()
    compiled, batch = codetta.compile(twin), capture_models.batch("llama")
    for m in (model, compiled, exact):
        m(**batch).loss.backward()
    (report,) = compiled.codetta_compiler.rewritten
    assert len(report.calls) == 3
    trained = 0
    for (name, p), q, e in zip(
        model.named_parameters(), twin.parameters(), exact.parameters(), strict=True
    ):
        assert (p.grad is None) == (q.grad is None) == ("lora_" not in name), name
        if q.grad is not None:
            trained += 1
            theirs, ours = (p.grad - e.grad).norm(), (q.grad - e.grad).norm()
            eps = torch.finfo(dtype).eps
            assert ours <= 2 * theirs + 2 * eps * e.grad.norm(), name
            assert q.grad.norm() > 0, name
    assert trained == 2 * 3 * base.config.num_hidden_layers
