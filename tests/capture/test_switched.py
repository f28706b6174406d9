"""Values made where gradients are off: tables are still known, and no region is drawn in there."""

from __future__ import annotations

import copy

import capture_models
import pytest
import torch
from torch import nn

import codetta
from codetta.explanation.facts import MEMORY


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


class Tables(nn.Module):
    """Rotary tables as some versions of transformers make them: gradients off, by matmul."""

    def __init__(self, inv_freq: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq.clone(), persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        inverse = self.inv_freq[None, :, None].expand(position_ids.shape[0], -1, 1).float()
        with torch.autocast(x.device.type, enabled=False):
            angles = (inverse @ position_ids[:, None, :].float()).transpose(1, 2)
            both = torch.cat((angles, angles), dim=-1)
            return both.cos().to(x.dtype), both.sin().to(x.dtype)


def models():
    model = capture_models.make("llama")
    older = copy.deepcopy(model)
    older.model.rotary_emb = Tables(model.model.rotary_emb.inv_freq)
    return model, older


def test_tables_made_without_gradients_are_fused_as_others_are():
    batch = capture_models.batch("llama")
    found = [codetta.explain(m, **batch) for m in models()]
    counts = [
        [(r.count, *(sum(k.kind == kind for k in r.after) for kind in ("gemm", MEMORY)))
         for r in f.regions] for f in found
    ]  # fmt: skip
    assert counts[0] == counts[1]


def test_no_gradient_is_lost():
    _, model = models()
    twin, batch = copy.deepcopy(model), capture_models.batch("llama")
    codetta.compile(model)(**batch).loss.backward()
    twin(**batch).loss.backward()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, msg=lambda m, n=name: f"{n}: {m}")


def test_a_table_that_is_written_into_is_not_known():
    class Written(Tables):
        @torch.no_grad()
        def forward(self, x, position_ids):
            cos, sin = super().forward(x, position_ids)
            cos[..., 0] = 0.5
            return cos * 1.0, sin  # a copy, which nobody writes into

    model, _ = models()
    model.model.rotary_emb = Written(model.model.rotary_emb.inv_freq)
    twin, batch = copy.deepcopy(model), capture_models.batch("llama")
    loss = codetta.compile(model)(**batch).loss
    torch.testing.assert_close(loss, twin(**batch).loss)
