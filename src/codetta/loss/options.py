"""What a loss is, apart from its tensors."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

#: Whether x, weight, bias and column scale need gradients.
Need = tuple[bool, bool, bool, bool]


class LinearCrossEntropyOutput(NamedTuple):
    """The loss and what was asked for beside it; the rest is None.

    Attributes:
        loss: () for the reductions 'mean' and 'sum', the shape of the targets for 'none'; fp32, or
            fp64 for fp64 hidden states.
        lse: log Σ e^z of every token, in the shape of the targets; differentiable.
        accuracy: 1 where no logit exceeds the target's, else 0, averaged over the tokens that are
            not ignored ('mean'), summed ('sum') or per token ('none', 0 where ignored).
        logits: z, (..., V) in the dtype of the hidden states, without gradient.
    """

    loss: Tensor
    lse: Tensor | None
    accuracy: Tensor | None
    logits: Tensor | None


@dataclass(frozen=True, slots=True)
class Logits:
    """How logits are made of the product: z = softcap(scale (r ⊙ (x Wᵀ) + bias)).

    Attributes:
        bias: whether there is one.
        scale: 1 for none.
        cap: z = cap tanh(. / cap); 0 for none.
        rows: whether there is a row scale r.
    """

    bias: bool = False
    scale: float = 1.0
    cap: float = 0.0
    rows: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """The loss of one token: lse − (1 − ε) z_target − ε mean(z) + z_loss lse².

    Attributes:
        logits: how they are made.
        smoothing: ε of the formula.
        z_loss: weight of lse².
        accuracy: whether the target's logit is compared with the largest.
        keep_logits: all logits are returned.
        slopes: the derivatives of loss and lse by the row scale are formed.
    """

    logits: Logits
    smoothing: float = 0.0
    z_loss: float = 0.0
    accuracy: bool = False
    keep_logits: bool = False
    slopes: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """Everything about a call but its tensors.

    Attributes:
        options: the loss.
        scalar: the losses are summed; otherwise each is returned.
        schedule, chunk, limit: what the caller says about the schedule, see
            :func:`codetta.loss.plan.choose`.
        need: whether x, weight, bias and column scale need gradients.
        wide_sums: whether sums over chunks must be fp32 or wider.
    """

    options: Options
    scalar: bool
    schedule: str | None
    chunk: int | None
    limit: int
    need: Need = (False, False, False, False)
    wide_sums: bool = False

    @property
    def text(self) -> str:
        """As an operator takes it; :meth:`parse` reads it."""
        o, z = self.options, self.options.logits
        parts = (
            (z.bias, z.scale, z.cap, z.rows),
            (o.smoothing, o.z_loss, o.accuracy, o.keep_logits, o.slopes),
            (self.scalar, self.schedule, self.chunk, self.limit), self.need, self.wide_sums,
        )  # fmt: skip
        return repr(parts)

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> Request:
        parts = ast.literal_eval(text)
        logits, options, (scalar, schedule, chunk, limit), need, wide_sums = parts
        made = Options(Logits(*logits), *options)
        return Request(made, scalar, schedule, chunk, limit, need, wide_sums)

    def needing(self, need: Need, row_scale: bool = False) -> Request:
        """The request where these gradients are needed, and the row scale's."""
        return replace(self, need=need, options=replace(self.options, slopes=row_scale))
