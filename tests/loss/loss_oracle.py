"""The loss as PyTorch computes it, with the logits, in any dtype; and random heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference(
    x, weight, target, *, bias=None, ignore_index=-100, reduction="mean", num_items_in_batch=None,
    label_smoothing=0.0, token_weight=None, softcap=None, logit_scale=1.0, z_loss=0.0, shift=False,
    row_scale=None, column_scale=None, **_,
):  # fmt: skip
    """loss, lse (of all tokens), logits."""
    if row_scale is not None:
        x = (x * row_scale.to(x.dtype if x.dtype.itemsize > 4 else torch.float32)[..., None]).to(
            x.dtype
        )
    if column_scale is not None:
        x = x * column_scale.to(x.dtype)
    logits = F.linear(x, weight, bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if shift:
        target = F.pad(target, (0, 1), value=ignore_index)[..., 1:]
        if token_weight is not None:
            token_weight = F.pad(token_weight, (0, 1))[..., 1:]
    z = logits if logits.dtype is torch.float64 else logits.float()
    lse = torch.logsumexp(z, -1)
    v = z.shape[-1]
    losses = F.cross_entropy(
        z.reshape(-1, v), target.reshape(-1).long(), ignore_index=ignore_index,
        label_smoothing=label_smoothing, reduction="none",
    ).reshape(target.shape)  # fmt: skip
    valid = target != ignore_index
    losses = losses + torch.where(valid, z_loss * lse**2, 0.0)
    weights = valid.to(z.dtype)
    if token_weight is not None:
        weights = weights * token_weight.to(z.dtype)
    losses = losses * weights
    if reduction == "none":
        return losses, lse, logits
    total = losses.sum()
    if reduction == "mean":
        total = total / (weights.sum() if num_items_in_batch is None else num_items_in_batch)
    return total, lse, logits


def head(
    *lead: int, d: int = 8, v: int = 13, dtype=torch.float64, seed=0, ignored=0.2, spread=1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (*lead, d), weight (v, d), target (*lead) with some ignored, bias (v,).

    The same numbers on every device; they lie on the default one.
    """
    here, generator = torch.get_default_device(), torch.Generator("cpu").manual_seed(seed)
    on_cpu = {"generator": generator, "device": "cpu"}
    x = torch.randn(*lead, d, dtype=torch.float64, **on_cpu) * spread
    weight = torch.randn(v, d, dtype=torch.float64, **on_cpu)
    target = torch.randint(0, v, lead, **on_cpu)
    target[torch.rand(lead, **on_cpu) < ignored] = -100
    bias = torch.randn(v, dtype=torch.float64, **on_cpu)
    leaves = [t.to(here, dtype).requires_grad_() for t in (x, weight, bias)]
    return leaves[0], leaves[1], target.to(here), leaves[2]


def close(got, expected, tolerance=1e-12) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
