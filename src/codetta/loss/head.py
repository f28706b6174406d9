"""The tensors of a loss head, whole or in part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from codetta.loss.epilogues import folded
from codetta.loss.options import Options
from codetta.loss.vocabulary import Vocabulary
from codetta.ops import compute_dtype, run_pointwise

#: Of x (M, D), weight (V, D), bias (V,) and column scale (D,); None where not asked for.
Gradients = list[Tensor | None]


class Leaves(NamedTuple):
    """The tensors that logits are made of: softcap(scale (r ⊙ ((x ⊙ γ) Wᵀ) + bias)).

    Attributes:
        x, weight, bias: (M, D), (V, D), (V,) or None, of one dtype.
        column_scale: γ (D,) in fp32 or fp64, or None.
        row_scale: r (M,) likewise.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    column_scale: Tensor | None
    row_scale: Tensor | None


@dataclass(frozen=True, slots=True)
class Head:
    """The tensors of a call, and what is computed of them.

    Attributes:
        leaves: tensors of :class:`Leaves`.
        target: (M,), rows of the weight.
        folded_x: x ⊙ column scale, once :meth:`folded`.
    """

    leaves: Leaves
    target: Tensor
    options: Options
    vocabulary: Vocabulary
    folded_x: Tensor | None = None

    @property
    def x(self) -> Tensor:
        return self.leaves.x

    @property
    def weight(self) -> Tensor:
        return self.leaves.weight

    @property
    def bias(self) -> Tensor | None:
        return self.leaves.bias

    @property
    def column_scale(self) -> Tensor | None:
        return self.leaves.column_scale

    @property
    def operand(self) -> Tensor:
        """What the weight is multiplied with."""
        assert self.column_scale is None or self.folded_x is not None
        return self.x if self.folded_x is None else self.folded_x

    @property
    def compute(self) -> torch.dtype:
        return compute_dtype(self.x.dtype, ())

    @property
    def words(self) -> int:
        """Size of the vocabulary, of which some rows may be elsewhere."""
        return self.vocabulary.size(len(self.weight))

    @property
    def row_vectors(self) -> list[Tensor]:
        """The row scale, if there is one, as an operand."""
        scale = self.leaves.row_scale
        return [] if scale is None else [scale[:, None]]

    @property
    def vectors(self) -> list[Tensor]:
        """Operands of the epilogue of the product: bias and row scale, where they are."""
        bias = [] if self.bias is None else [self.bias[None, :]]
        return [*bias, *self.row_vectors]

    def folded(self) -> Head:
        """With x ⊙ column scale formed, rounded once to the dtype of x: as large as x.

        Folded into x and not into the weight, forward and backward, so that logits that are
        computed again have the same bits.
        """
        if self.column_scale is None:
            return self
        operands = [self.x, self.column_scale[None, :]]
        m, d = self.x.shape
        (made,) = run_pointwise(folded, operands, m, d, self.x.dtype, self.compute)
        return replace(self, folded_x=made)

    def rows(self, start: int, stop: int) -> Head:
        """The head of some tokens."""
        scale = self.leaves.row_scale
        leaves = self.leaves._replace(
            x=self.x[start:stop], row_scale=None if scale is None else scale[start:stop]
        )
        made = None if self.folded_x is None else self.folded_x[start:stop]
        return replace(self, leaves=leaves, target=self.target[start:stop], folded_x=made)

    def columns(self, start: int, stop: int) -> Head:
        """The head of some rows of the weight; other targets lie outside."""
        bias = None if self.bias is None else self.bias[start:stop]
        leaves = self.leaves._replace(weight=self.weight[start:stop], bias=bias)
        return replace(self, leaves=leaves, target=self.target - start)
