"""When which chunk of logits is computed: the schedules of the loss head and what they cost.

    forward     for each chunk of tokens: its shifted exponentials, or its logits and dz, then dx
                and its share of dW, all in the forward pass; the backward multiplies by the
                upstream gradient. Three GEMMs. Only for a loss that is one number, since then
                gradients are linear in one number.
    recompute   the forward keeps statistics only; the backward computes the logits again. Four
                GEMMs, any upstream gradient. Its backward goes over chunks of the vocabulary
                (dW of a chunk is complete at once, dx is summed) or of the tokens (the reverse).

A sum over chunks needs more digits than a 16-bit result and is rounded once. It is kept in fp32,
4 V D bytes for dW or 4 M D for dx before the result is made of it.

Where 4 V D bytes are too many, dW of 'forward' in bf16 is summed in 24 or 20 bits, of which the
gradient's own memory holds the upper half of an fp32 number and V D or V D / 2 bytes beside it the
rest (:mod:`codetta.backends.short_sums`). The last chunk's product rounds the sum into the
gradient. What is lost before, in roundings to bf16, of relative variance one unit each (an error of
1.66e-3):

    a gradient     the shifted form has three roundings: E, the weighted rows of x and the stored
                   dW; 3 units, 2.88e-3
    24 bits        cut off: a sum loses 1.1e-5 of itself on average and 3.1e-5 at most, always
                   towards 0; over c chunks 1.1e-5 (c - 1)/2, since the sum of k of them is about
                   k/c of all: 16 chunks 8e-5, 128 chunks 7e-4
    20 bits        rounded to nearest: 1.0e-4 of a sum and 2.4e-4 at most, either way; over c chunks
                   1.0e-4 √(c/3): 8 chunks 1.7e-4. At most, c - 1 roundings lose 2.4e-4 (c - 1),
                   which for up to 9 chunks is less than the last rounding to bf16 may, 2^-9

These are to be added to 2.88e-3 in squares. So no accuracy is lost that can be measured, and an
addition moves 6 or 5 bytes per element, not 8. Sums of more bits are taken where they fit and cost
little more time.

The cheapest schedule whose extra memory stays within a limit is chosen; extra is what is alive at
the peak beside inputs and gradients. Time is counted GEMM by GEMM, the larger of its operations and
its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from codetta.backends.short_sums import low_columns

#: Extra memory that an automatic choice may take, in bytes.
MEMORY_LIMIT = 1 << 30
#: Dense 16-bit tensor-core rate and memory bandwidth that an H200 sustains, and a kernel's launch.
FLOPS_PER_SECOND, BYTES_PER_SECOND, LAUNCH_SECONDS = 7.0e14, 4.0e12, 5e-6
#: What an epilogue that adds to a sum takes per element, whatever its bits are: a product over 1024
#: tokens was 1.22 or 1.23 times the plain one on an H200, over 2048 0.97 to 1.07 (17b6632,
#: benchmarks/results/2026-12-03-h200-4/sustained_sum24.json).
SUM_SECONDS = 3.5e-12
#: A kernel hides all but this share of the smaller of its two times.
UNHIDDEN = 0.1
#: Sizes of chunks that are tried: multiples of a tile, four from one power of two to the next.
CHUNKS = (128, 256, 384, 512, *(128 * k << i for i in range(9) for k in (5, 6, 7, 8)))
#: A plan with sums of more bits is preferred up to this multiple of the time of the fastest.
PRECISION_COST = 1.03
#: Bits of a sum that is fp32, or fp64.
WIDE = 32
#: Chunks whose sum may be kept in 20 bits.
CHUNKS_OF_20_BITS = 9
#: Multiprocessors of an H200.
PROCESSORS = 132
#: Tiles that products are computed in, and about how fast their kernels are beside the fastest.
TILES = (
    (128, 256, 1.0), (256, 128, 1.0), (128, 192, 1.0), (192, 128, 1.0), (128, 128, 0.95),
    (64, 128, 0.75),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Problem:
    """Sizes of a loss head, and what is asked of it.

    Attributes:
        m, d, v: tokens, width of the hidden states, rows of the weight.
        dtype: of hidden states and weight.
        scalar: the losses are summed, so there is one upstream gradient.
        dx, dw, db: which gradients will be needed, of hidden states or their column scale, of
            weight and bias.
        fold: whether the hidden states have a column scale, which is multiplied into each chunk.
        shifted: whether exponentials are stored instead of logits, see
            :mod:`codetta.loss.shifted`.
        wide_sums: sums over chunks in fp32 or wider, whatever memory they take.
    """

    m: int
    d: int
    v: int
    dtype: torch.dtype
    scalar: bool
    dx: bool
    dw: bool
    db: bool = False
    fold: bool = False
    shifted: bool = False
    wide_sums: bool = False

    @property
    def differentiated(self) -> bool:
        return self.dx or self.dw or self.db

    @property
    def narrow(self) -> bool:
        """Whether a sum over chunks must be kept wider than the result, if nothing else is said."""
        return self.dtype.itemsize < 4

    @property
    def short_sums(self) -> bool:
        """Whether dW may be summed in fewer bits than fp32 has."""
        return self.dtype is torch.bfloat16 and self.scalar and self.dw and not self.wide_sums


@dataclass(frozen=True, slots=True)
class LossPlan:
    """One schedule with its costs.

    Attributes:
        schedule: 'forward' or 'recompute'.
        over: what the backward of 'recompute' is cut along, 'vocabulary' or 'tokens'.
        rows: tokens of a chunk of the forward pass.
        chunk: tokens or vocabulary rows of a chunk of the backward of 'recompute'.
        sum_bits: of each element of a dW that is summed over chunks.
        seconds: forward and backward on an H200, by the model.
        bytes_extra: peak memory beside inputs and gradients.
    """

    schedule: str
    over: str
    rows: int
    chunk: int
    sum_bits: int
    seconds: float
    bytes_extra: int

    def __str__(self) -> str:
        how = f"chunks of {self.rows} tokens"
        if self.schedule == "recompute":
            how += f", backward in chunks of {self.chunk} of the {self.over}"
        how += f", dW summed in {self.sum_bits} bits" if self.sum_bits < WIDE else ""
        return (
            f"{self.schedule}: {how}; {self.bytes_extra / 2**20:.0f} MiB extra, "
            f"{self.seconds * 1e3:.2f} ms by the model"
        )


def choose(
    problem: Problem,
    *,
    schedule: str | None = None,
    chunk: int | None = None,
    limit: int = MEMORY_LIMIT,
) -> LossPlan:
    """The fastest schedule within the limit, with sums of more bits if they cost little; the
    smallest if none is within it.

    Args:
        schedule: 'forward' or 'recompute' to have that one. Nothing to differentiate, or more
            than one upstream gradient, leave no choice.
        chunk: number of tokens of a chunk, in the backward too.
    """
    return _chosen(problem, schedule, chunk, limit)


@lru_cache(maxsize=1024)
def _chosen(problem: Problem, schedule: str | None, chunk: int | None, limit: int) -> LossPlan:
    possible = list(candidates(problem, chunk))
    found = [p for p in possible if _allowed(p, problem, schedule)] or possible
    fitting = [p for p in found if p.bytes_extra <= limit]
    if not fitting:
        return min(found, key=lambda p: (p.bytes_extra, p.seconds))
    fastest = min(fitting, key=lambda p: (p.seconds, p.bytes_extra))
    near = PRECISION_COST * fastest.seconds
    bits = max(p.sum_bits for p in fitting if p.seconds <= near)
    return min((p for p in fitting if p.sum_bits == bits), key=lambda p: (p.seconds, p.bytes_extra))


def _allowed(plan: LossPlan, problem: Problem, schedule: str | None) -> bool:
    # Gradients of fp16 that are formed before the upstream gradient (a loss scale) is known would
    # vanish: 1 / M alone is below the smallest fp16 number for M = 2^25, p / M long before.
    vanishing = plan.schedule == "forward" and problem.dtype is torch.float16
    return plan.schedule == schedule or (schedule is None and not vanishing)


def candidates(problem: Problem, chunk: int | None = None) -> Iterator[LossPlan]:
    """All schedules of a problem that are possible."""
    for rows in _sizes(problem.m, chunk):
        if problem.scalar and problem.differentiated:
            yield _forward(problem, rows)
            if problem.short_sums and rows < problem.m:
                yield _forward(problem, rows, 24)
                if _pieces(problem.m, rows) <= CHUNKS_OF_20_BITS:
                    yield _forward(problem, rows, 20)
        if chunk is not None:
            yield _recompute(problem, rows, "tokens", rows)
    if chunk is None:
        statistics = max(128, _CHUNK_ELEMENTS // problem.v // 128 * 128)
        for over, size in (("tokens", problem.m), ("vocabulary", problem.v)):
            for part in _sizes(size, None):
                yield _recompute(problem, max(1, min(problem.m, statistics)), over, part)


#: Elements of a chunk of logits in a pass that stores none of them on a GPU; the reference does.
_CHUNK_ELEMENTS = 1 << 28


def _sizes(size: int, chunk: int | None) -> list[int]:
    if chunk is not None:
        return [max(1, min(chunk, size))]
    return [c for c in CHUNKS if c < size] + ([max(1, size)] if size <= CHUNKS[-1] else [])


# ------------------------------------------------------------------------------------- costs
def _forward(p: Problem, rows: int, bits: int = WIDE) -> LossPlan:
    chunks = _pieces(p.m, rows)
    e = p.dtype.itemsize
    kept = rows * p.v * e
    seconds = chunks * (
        _gemm(rows, p.v, p.d, e, e)
        + (_kernel(2 * rows * p.d * e) if p.shifted else _kernel(2 * kept))
        + (_gemm(rows, p.d, p.v, e, e) if p.dx else 0.0)
        + (_gemm(p.v, p.d, rows, e, sum_bytes(p, chunks, bits)) if p.dw else 0.0)
    )
    scaled = (p.m * p.dx + p.v * p.dw) * p.d * e
    seconds += _kernel(2 * scaled)
    # Shifted exponentials are used as they are, beside the weighted rows of x or the rows of dx,
    # which are not there together; dx of all rows is the gradient, and comes when the others have
    # gone. Of logits a dz is made, which is a second chunk.
    extra = 2 * kept
    if p.shifted:
        extra = kept + (rows * p.d * e if chunks > 1 or not p.dx else 0)
    if p.fold:
        extra += rows * p.d * e
        seconds += chunks * _kernel(2 * rows * p.d * e)
    if bits < WIDE:
        extra += p.v * low_columns(p.d, bits)
    elif p.dw and p.narrow and chunks > 1:
        extra = _with_sum(extra, p.v * p.d, e)
        seconds += _kernel((4 + e) * p.v * p.d)
    return LossPlan("forward", "tokens", rows, rows, bits, seconds, extra)


def _recompute(p: Problem, rows: int, over: str, chunk: int) -> LossPlan:
    e = p.dtype.itemsize
    passes = _pieces(p.m, rows)
    seconds = passes * _gemm(rows, p.v, p.d, e, 0)
    seconds += passes * _kernel(2 * rows * p.d * e) if p.fold else 0.0
    extra = 0
    if p.differentiated:
        m, v = (chunk, p.v) if over == "tokens" else (p.m, chunk)
        chunks = _pieces(p.m, m) * _pieces(p.v, v)
        total = sum_bytes(p, chunks)
        x_bytes, w_bytes = (e, total) if over == "tokens" else (total, e)
        seconds += chunks * (
            _gemm(m, v, p.d, e, e)
            + (_gemm(m, p.d, v, e, x_bytes) if p.dx else 0.0)
            + (_gemm(v, p.d, m, e, w_bytes) if p.dw else 0.0)
        )
        extra = m * v * e
        if p.fold:  # of all tokens at once, if each chunk of the vocabulary needs all
            extra += m * p.d * e
            seconds += _pieces(p.m, m) * _kernel(2 * m * p.d * e)
            if over == "vocabulary" and p.dx:  # its sum stays wide for the pass that unfolds it
                seconds += _kernel((4 + 2 * e) * p.m * p.d)
                extra += max(4, e) * p.m * p.d if chunks == 1 or not p.narrow else 0
        if chunks > 1:
            if over == "tokens":  # a part of dx is made, then put where it belongs
                extra, summed = extra + m * p.d * e * p.dx, p.v * p.d * p.dw
            else:
                extra, summed = extra + v * p.d * e * p.dw, p.m * p.d * p.dx
            seconds += _kernel(2 * (p.m * p.d if over == "tokens" else p.v * p.d) * e)
            if p.narrow:
                extra = _with_sum(extra, summed, e)
                seconds += _kernel((4 + e) * summed)
    extra = max(extra, rows * p.d * e) if p.fold else extra
    return LossPlan("recompute", over, rows, chunk, WIDE, seconds, extra)


def _with_sum(extra: int, elements: int, e: int) -> int:
    """Extra memory with a sum over chunks beside what a chunk needs.

    A sum in fp32 becomes the gradient at the end: until then the gradient is not there yet, after
    the last chunk only the sum is.
    """
    return max(extra + (4 - e) * elements, 4 * elements)


def _pieces(size: int, part: int) -> int:
    return max(1, -(-size // max(1, part)))


def sum_bytes(p: Problem, chunks: int, bits: int = WIDE) -> int:
    """Bytes written and read per element of a product that is added to a sum over chunks."""
    e = p.dtype.itemsize
    return e if chunks == 1 else bits // 4 if bits < WIDE else 2 * max(4, e)


def _gemm(m: int, n: int, k: int, read: int, written: int) -> float:
    operations = 2 * m * n * k / FLOPS_PER_SECOND / _busy(m, n)
    moved = ((m + n) * k * read + m * n * written) / BYTES_PER_SECOND
    if written > read:  # a sum: loaded, added to and stored
        moved = max(moved, m * n * SUM_SECONDS)
    return max(operations, moved) + UNHIDDEN * min(operations, moved) + LAUNCH_SECONDS


def _busy(m: int, n: int) -> float:
    """Share of the processors' time that goes into an m x n output, in the tile that suits it.

    An output of few tiles leaves processors idle in its last wave: dx of a chunk of 3328 tokens
    with D 4096 is 416 tiles of 128 x 256, of 528 that would fit into its four waves.
    """
    if m * n == 0:
        return 1.0
    shares = []
    for tile_m, tile_n, rate in TILES:
        waves = -(-_pieces(m, tile_m) * _pieces(n, tile_n) // PROCESSORS)
        shares.append(rate * m * n / (waves * PROCESSORS * tile_m * tile_n))
    return max(shares)


def _kernel(moved: int) -> float:
    return moved / BYTES_PER_SECOND + LAUNCH_SECONDS
