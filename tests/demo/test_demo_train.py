from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from codetta.demo import models
from codetta.demo.train import Run, fine_tune, gradient_errors

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source() -> models.Source:
    return models.small_random(0)


def train(source: models.Source, dtype: torch.dtype, lr: float, steps: int) -> tuple[Run, Any]:
    model = models.copy_of(source.model, dtype, CPU)
    batch = torch.arange(64).reshape(1, 64)
    reference = models.fp64_gradients(source.model, batch, CPU)
    loss = models.hf_loss(model)
    run = fine_tune(
        "run",
        model,
        loss,
        [batch],
        initial=dict(source.model.named_parameters()),
        steps=steps,
        lr=lr,
        reference=reference,
    )
    return run, model


def test_a_run_notes_losses_times_gradients_and_kernels(source: models.Source) -> None:
    run, _ = train(source, torch.float32, 1e-3, steps=4)
    assert len(run.losses) == len(run.seconds) == 4
    assert run.losses[-1] < run.losses[0]
    assert max(run.gradient_errors.values()) < 1e-4
    assert {"layers", "embedding", "other"} <= set(run.kernels)
    assert run.peak_bytes is None


def test_bf16_weights_follow_the_fp32_weights_of_small_updates(source: models.Source) -> None:
    """AdamW moves a weight by about lr a step, and 1e-5 is below half an ulp of most weights."""
    run, bf16 = train(source, torch.bfloat16, 1e-5, steps=5)
    _, fp32 = train(source, torch.float32, 1e-5, steps=5)
    before = source.model.model.layers[0].mlp.up_proj.weight.detach()
    exact = fp32.model.layers[0].mlp.up_proj.weight.detach() - before
    moved = bf16.model.layers[0].mlp.up_proj.weight.detach().float() - before.bfloat16().float()
    assert run.dtype == torch.bfloat16
    # Single weights are rounded, their sum along the update is not lost.
    assert float((moved * exact).sum() / (exact * exact).sum()) == pytest.approx(1, abs=0.1)


def test_the_first_step_does_not_count_as_time_per_step() -> None:
    assert Run("x", torch.float32, seconds=[9.0, 1.0, 2.0, 3.0]).seconds_per_step == 2.0
    assert Run("x", torch.float32, seconds=[9.0]).seconds_per_step == 9.0


def test_a_missing_gradient_has_no_finite_error() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    errors = gradient_errors(model, {"weight": torch.zeros(2, 2).double()})
    assert errors["weight"] == 2.0
    assert math.isnan(errors["bias"])
