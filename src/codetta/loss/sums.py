"""Gradients of a loss head from its chunks of dz.

With h = x ⊙ γ, or x where there is no column scale γ: dh = dz W, dW = dzᵀ h, dx = dh ⊙ γ and
dγ = Σ over tokens of dh ⊙ x. Where a chunk of dh is complete at once the last two are its epilogue,
in fp32 from the accumulator; where dh is a sum over chunks they are one pass over the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from codetta.backends.short_sums import low_columns
from codetta.loss import shifted
from codetta.loss.epilogues import unfolded, widened
from codetta.loss.head import Gradients, Head
from codetta.loss.options import Need
from codetta.loss.plan import WIDE, LossPlan
from codetta.ops import IDENTITY, run_gemm, run_gemm_accumulate_, run_gemm_short_sum_, run_pointwise


class Sums:
    """dh = dz W, dW = dzᵀ h and dbias = Σ dz, chunk by chunk; of dh, dx and dγ.

    Of chunks of tokens, a chunk of dx is complete at once and dW is a sum over all; of chunks of
    the vocabulary it is the other way round. Sums are kept with more digits than the result has:
    in fp32 or, if the plan says so, in 24 or 20 bits, in the gradient's memory and a byte or half
    a byte per element.
    """

    def __init__(self, head: Head, need: Need, plan: LossPlan, chunks: int) -> None:
        self.head, self.chunks = head, chunks
        self.need_x, self.need_w, self.need_b, self.need_column = need
        self.tokens, self.bits = plan.over == "tokens", plan.sum_bits
        self.parts: Tensor | None = None  # of the gradient that is made of complete parts
        self.total: Tensor | None = None  # of the other one
        self.low: Tensor | None = None  # its last bits, with 24 or 20
        self.summed = 0  # chunks that are in it
        self.bias: Tensor | None = None
        self.column: Tensor | None = None

    def add(self, part: Head, start: int, dz: Tensor, column_sum: Tensor | None = None) -> None:
        """Take one chunk; ``start`` is its first token or word."""
        if self.need_x or self.need_column:
            if not self.tokens:
                self._sum(start, dz, part.weight, wide=part.column_scale is not None)
            elif part.column_scale is None:
                self._put(start, *run_gemm(IDENTITY, dz, part.weight))
            else:
                self._unfold(start, part, dz)
        if self.need_w:
            if self.tokens:
                self._sum(start, dz.t(), part.operand)
            else:
                self._put(start, *run_gemm(IDENTITY, dz.t(), part.operand))
        if column_sum is not None:
            self._add_bias(start, column_sum)

    def add_shifted(self, part: Head, start: int, e: Tensor, factor: Tensor) -> None:
        """Take a chunk of tokens whose dz is factor ⊙ e; see :mod:`codetta.loss.shifted`."""
        if self.need_w:  # first: the weighted rows are gone before dx, as large, is there
            self._sum(start, e.t(), shifted.weighted(part, factor))
        if self.need_x:
            self._put(start, shifted.of_x(part, e, factor))

    def _unfold(self, start: int, part: Head, dz: Tensor) -> None:
        program = unfolded(self.need_x, self.need_column, False)
        made = run_gemm(program, dz, part.weight, self._scaling(part))
        if self.need_x:
            self._put(start, made[0])
        if self.need_column:
            self.column = made[-1] if self.column is None else self.column + made[-1]

    def _scaling(self, part: Head) -> list[Tensor]:
        """Operands of :func:`codetta.loss.epilogues.unfolded`."""
        assert part.column_scale is not None
        column = [part.column_scale[None, :]] if self.need_x else []
        return column + ([part.x] if self.need_column else [])

    def _unfold_sum(self) -> Tensor | None:
        """dx of the sum that dh is; dγ beside it."""
        if self.total is None:
            return None
        total, head = self.total, self.head
        program = unfolded(self.need_x, self.need_column, True)
        operands, (m, d) = [total, *self._scaling(head)], total.shape
        made = run_pointwise(program, operands, m, d, head.x.dtype, head.compute)
        self.column = made[-1] if self.need_column else None
        return made[0] if self.need_x else None

    def _put(self, start: int, made: Tensor) -> None:
        if self.chunks == 1:
            self.parts = made
            return
        if self.parts is None:
            self.parts = made.new_empty(self._whole().shape)
        self.parts[start : start + len(made)] = made

    def _sum(self, start: int, a: Tensor, b: Tensor, *, wide: bool = False) -> None:
        self.summed += 1
        if self.bits < WIDE:
            self._short_sum(a, b)
        elif self.total is None:
            narrow = self.chunks == 1 and not wide
            (self.total,) = run_gemm(IDENTITY if narrow else widened, a, b)
        else:
            run_gemm_accumulate_(self.total, a, b)

    def _short_sum(self, a: Tensor, b: Tensor) -> None:
        first, last = self.summed == 1, self.summed == self.chunks
        if self.total is None or self.low is None:
            (v, _), d = a.shape, b.shape[1]
            self.total = a.new_empty(v, d)
            columns = low_columns(d, self.bits)
            pitch = -(-columns // 16) * 16  # rows that TMA can write
            self.low = a.new_empty(v, pitch, dtype=torch.uint8)[:, :columns]
        run_gemm_short_sum_(self.total, self.low, a, b, self.bits, first=first, last=last)

    def _add_bias(self, start: int, column_sum: Tensor) -> None:
        if self.bias is None:
            self.bias = column_sum.new_zeros(len(self.head.weight))
        at = 0 if self.tokens else start
        self.bias[at : at + len(column_sum)] += column_sum

    def result(self) -> Gradients:
        """The gradients, each in the dtype of its tensor; zeros of no chunks."""
        head, bias, column = self.head, self.head.bias, self.head.column_scale
        if column is not None and not self.tokens:
            total = self._unfold_sum()
        else:
            total = None if self.total is None else self.total.to(head.x.dtype)
        dx, dw = (self.parts, total) if self.tokens else (total, self.parts)
        dx = _or_zeros(dx, head.x) if self.need_x else None
        d_column = None
        if self.need_column and column is not None:
            d_column = head.vocabulary.summed(_or_zeros(self.column, column))
        return [
            None if dx is None else head.vocabulary.summed(dx),
            _or_zeros(dw, head.weight) if self.need_w else None,
            _or_zeros(self.bias, bias) if self.need_b and bias is not None else None,
            d_column,
        ]

    def _whole(self) -> Tensor:
        return self.head.x if self.tokens else self.head.weight


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient.to(like.dtype)
