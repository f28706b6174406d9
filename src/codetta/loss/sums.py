"""Gradients of a loss head from its chunks of dz."""

from __future__ import annotations

import torch
from torch import Tensor

from codetta.backends.select import backend_for
from codetta.backends.watched import is_watched
from codetta.language import Program
from codetta.loss.epilogues import split, split_sum, widened
from codetta.loss.head import Gradients, Head
from codetta.loss.plan import LossPlan
from codetta.ops import IDENTITY, run_gemm, run_gemm_accumulate_


class Sums:
    """dx = dz W, dW = dzᵀ x and dbias = Σ dz, chunk by chunk.

    Of chunks of tokens, a chunk of dx is complete at once and dW is a sum over all; of chunks of
    the vocabulary it is the other way round. Sums are kept with more digits than the result has.
    """

    def __init__(
        self, head: Head, need: tuple[bool, bool, bool], plan: LossPlan, chunks: int
    ) -> None:
        self.head, self.chunks = head, chunks
        self.need_x, self.need_w, self.need_b = need
        self.tokens, self.split = plan.over == "tokens", plan.split
        self.parts: Tensor | None = None  # of the gradient that is made of complete parts
        self.sums: list[Tensor] = []  # of the other one: one number wide, or split in two
        self.bias: Tensor | None = None

    def add(self, part: Head, start: int, dz: Tensor, column_sum: Tensor | None = None) -> None:
        """Take one chunk; ``start`` is its first token or word."""
        if self.need_x:
            (self._put if self.tokens else self._sum)(start, dz, part.weight)
        if self.need_w:
            (self._sum if self.tokens else self._put)(start, dz.t(), part.x)
        if column_sum is not None:
            self._add_bias(start, column_sum)

    def _put(self, start: int, a: Tensor, b: Tensor) -> None:
        (made,) = run_gemm(IDENTITY, a, b)
        if self.chunks == 1:
            self.parts = made
            return
        if self.parts is None:
            self.parts = made.new_empty(self._whole().shape)
        self.parts[start : start + len(made)] = made

    def _sum(self, start: int, a: Tensor, b: Tensor) -> None:
        if not self.sums:
            first = IDENTITY if self.chunks == 1 else split if self.split else widened
            self.sums = run_gemm(first, a, b)
        elif self.split:
            self.sums = _overwriting(split_sum, a, b, self.sums)
        else:
            run_gemm_accumulate_(self.sums[0], a, b)

    def _add_bias(self, start: int, column_sum: Tensor) -> None:
        if self.bias is None:
            self.bias = column_sum.new_zeros(len(self.head.weight))
        at = 0 if self.tokens else start
        self.bias[at : at + len(column_sum)] += column_sum

    def result(self) -> Gradients:
        """The gradients, each in the dtype of its tensor; zeros of no chunks."""
        parts = self.parts
        total = self.sums[0].to(self.head.x.dtype) if self.sums else None
        dx, dw = (parts, total) if self.tokens else (total, parts)
        head, bias = self.head, self.head.bias
        dx = _or_zeros(dx, head.x) if self.need_x else None
        return [
            None if dx is None else head.vocabulary.summed(dx),
            _or_zeros(dw, head.weight) if self.need_w else None,
            _or_zeros(self.bias, bias) if self.need_b and bias is not None else None,
        ]

    def _whole(self) -> Tensor:
        return self.head.x if self.tokens else self.head.weight


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient.to(like.dtype)


def _overwriting(program: Program, a: Tensor, b: Tensor, operands: list[Tensor]) -> list[Tensor]:
    """Results of a program, in the memory of its operands where a backend can."""
    if is_watched(a, b):
        return run_gemm(program, a, b, operands)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        into = dict(enumerate(operands))
        return backend_for(a).gemm(program, a, b, operands, None, False, into=into)
