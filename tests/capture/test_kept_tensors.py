"""A compiled step leaves nothing alive that a pool of Inductor's CUDA graphs would miss."""

from __future__ import annotations

import capture_models
import pytest
import torch
from helpers.fused import running
from helpers.pools import left_by

import codetta


@pytest.mark.parametrize("logits", ["keep", "none"])
def test_a_step_leaves_nothing_alive_but_what_is_made_outside(logits):
    torch._dynamo.reset()
    model = capture_models.make("llama", dtype=torch.bfloat16)
    batch = capture_models.batch("llama", tokens=11)
    compiled = codetta.compile(model, logits=logits)

    def step():
        compiled(**batch).loss.backward()
        model.zero_grad()

    with running("emulated"):
        left = left_by(lambda: [step() for _ in range(3)])
    assert not left, [(x.shape, x.dtype) for x in left]
