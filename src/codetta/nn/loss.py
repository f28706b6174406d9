"""The loss head as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from codetta.loss import linear_cross_entropy


class LinearCrossEntropyLoss(nn.Module):
    """Cross-entropy of a head that is never evaluated; :func:`codetta.linear_cross_entropy`.

    The settings of the loss are the module's, the tensors are the call's. It has no parameters: the
    head stays where it is, and may be tied.

        criterion = codetta.nn.LinearCrossEntropyLoss(shift=True)
        loss = criterion(hidden, model.lm_head.weight, input_ids)

    Args:
        accum_dtype: None, or ``torch.float32`` for sums of dW over chunks of tokens that are never
            kept in less. Another one is a BadAttribute of the call.
        settings: keyword arguments of :func:`codetta.linear_cross_entropy` but its tensors.
    """

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        z_loss: float = 0.0,
        shift: bool = False,
        accum_dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {
            "ignore_index": ignore_index, "reduction": reduction,
            "label_smoothing": label_smoothing, "softcap": softcap, "logit_scale": logit_scale,
            "z_loss": z_loss, "shift": shift, "accum_dtype": accum_dtype, **settings,
        }  # fmt: skip

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        token_weight: Tensor | None = None,
        row_scale: Tensor | None = None,
        column_scale: Tensor | None = None,
        num_items_in_batch: int | float | Tensor | None = None,
    ) -> Any:
        """x (..., D), weight (V, D), target (...) -> what the function returns."""
        return linear_cross_entropy(
            x, weight, target, bias=bias, token_weight=token_weight, row_scale=row_scale,
            column_scale=column_scale, num_items_in_batch=num_items_in_batch, **self.settings,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """The settings that are not the default ones."""
        return ", ".join(f"{k}={v!r}" for k, v in self.settings.items() if v != _DEFAULTS.get(k))


_DEFAULTS: dict[str, Any] = LinearCrossEntropyLoss().settings
