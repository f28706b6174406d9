"""The tensors of a loss head, whole or in part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from codetta.loss.options import Options
from codetta.loss.vocabulary import Vocabulary
from codetta.ops import compute_dtype

#: Of x (M, D), weight (V, D) and bias (V,); None where not asked for.
Gradients = list[Tensor | None]


@dataclass(frozen=True, slots=True)
class Head:
    """The tensors of a call, and what is computed of them."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    options: Options
    vocabulary: Vocabulary

    @property
    def compute(self) -> torch.dtype:
        return compute_dtype(self.x.dtype, ())

    @property
    def words(self) -> int:
        """Size of the vocabulary, of which some rows may be elsewhere."""
        return self.vocabulary.size(len(self.weight))

    def rows(self, start: int, stop: int) -> Head:
        """The head of some tokens."""
        return Head(
            self.x[start:stop], self.weight, self.bias, self.target[start:stop], self.options,
            self.vocabulary,
        )  # fmt: skip

    def columns(self, start: int, stop: int) -> Head:
        """The head of some rows of the weight; other targets lie outside."""
        bias = None if self.bias is None else self.bias[start:stop]
        target = self.target - start
        return Head(
            self.x, self.weight[start:stop], bias, target, self.options, self.vocabulary
        )  # fmt: skip
