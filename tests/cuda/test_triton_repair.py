"""The kernel that computes overflowed rows of the loss head again, against its definition."""

from __future__ import annotations

import pytest
import torch
from triton_runner import DEVICE, TOLERANCE

from codetta.backends.cuda.triton_repair import repair
from codetta.loss import shifted
from codetta.loss.head import Head, Leaves
from codetta.loss.options import Logits, Options
from codetta.loss.vocabulary import WHOLE

M, D, V = 5, 200, 131


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vectors", [False, True], ids=["plain", "bias and row scale"])
def test_rows_above_the_limit_and_no_others(dtype, vectors):
    torch.manual_seed(0)
    x = torch.randn(M, D) * torch.tensor([1.0, 9.0, 1.0, 9.0, 1.0])[:, None] / 3
    x, weight = x.to(DEVICE, dtype), torch.randn(V, D).to(DEVICE, dtype)
    bias = torch.randn(V).to(DEVICE, dtype) if vectors else None
    rows = (torch.rand(M) + 0.5).to(DEVICE) if vectors else None
    scale = 0.9 if vectors else 1.0
    part = Head(
        Leaves(x, weight, bias, None, rows), torch.zeros(M, dtype=torch.long, device=DEVICE),
        Options(Logits(vectors, scale, 0.0, vectors)), WHOLE,
    )  # fmt: skip
    z = x.float() @ weight.float().t()
    z = scale * (z * rows[:, None] + bias if vectors else z)
    base = z.amin(1)
    e = torch.exp(z - base[:, None]).to(dtype)
    total = torch.exp(z - base[:, None]).sum(1)
    limit = float(total.sort().values[2])  # two rows are above
    pitched = torch.empty(M, V + 5, dtype=dtype, device=DEVICE)[:, :V].copy_(e)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shifted, "LIMIT", limit)
        expected = shifted.repaired(part, e, base, total)
    made = repair(x, weight, bias, rows, scale, pitched, base, total, limit)
    for found, wanted in zip(made, expected, strict=True):
        assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
    changed = (total > limit).nonzero()[:, 0].tolist()
    assert len(changed) == 2
    slack = 2 * torch.finfo(dtype).eps + 100 * TOLERANCE
    assert torch.allclose(pitched.float(), e.float(), rtol=slack, atol=slack)
    kept = [i for i in range(M) if i not in changed]
    assert torch.equal(pitched[kept], e[kept])
