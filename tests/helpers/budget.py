"""The error budget: ‖out - ref64‖ <= 2 ‖torch - ref64‖ + 2 eps ‖sum of absolute addends‖.

Norms are Frobenius norms over the finite elements; the masks of NaN, +Inf and -Inf must be equal.
"""

from __future__ import annotations

import torch
from torch import Tensor


def within_budget(
    name: str, out: Tensor, exact: Tensor, eager: Tensor, addends: Tensor | None = None
) -> None:
    """Assert that ``out`` is as near to ``exact`` (fp64) as its budget allows.

    ``eager`` is what PyTorch computes in the dtype of ``out``; ``addends`` defaults to |exact|.
    """
    wide, eager = out.double().reshape(exact.shape), eager.double().reshape(exact.shape)
    for what in (torch.isnan, torch.isposinf, torch.isneginf):
        # What overflows the dtype is infinite in PyTorch too.
        expected = what(exact.to(out.dtype))
        assert torch.equal(what(wide), expected), f"{name}: masks of {what.__name__} differ"
    finite = torch.isfinite(exact) & torch.isfinite(wide)
    size = (exact if addends is None else addends.reshape(exact.shape)).abs()[finite]
    error = norm(wide[finite] - exact[finite])
    theirs = norm((eager[finite] - exact[finite]).nan_to_num(0.0, 0.0, 0.0))
    allowed = 2 * theirs + 2 * torch.finfo(out.dtype).eps * norm(size)
    assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"


def norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.double())) if x.numel() else 0.0
