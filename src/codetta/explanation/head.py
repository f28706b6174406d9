"""What a head and its loss cost as one call: the kernels of the schedule that is chosen for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from codetta.capture.headcall import HeadCall
from codetta.explanation.facts import BACKWARD, FORWARD, GEMM, MEMORY, KernelFact
from codetta.loss.options import Logits, Options
from codetta.loss.plan import MEMORY_LIMIT, WIDE, LossPlan, Problem, choose, sum_bytes
from codetta.loss.shifted import applies

#: Said of it in the summary.
NOTE = "and its loss, fused: logits never stored"


@dataclass(frozen=True)
class HeadSizes:
    """A call's sizes, and the schedule it runs with."""

    problem: Problem
    plan: LossPlan

    @property
    def key(self) -> str:
        """Equal for calls that cost the same."""
        return f"head {self.problem} {self.plan}"


def head_sizes(call: HeadCall, arguments: Sequence[Any], training: bool) -> HeadSizes:
    """Read off the call's fake arguments: hidden states, weight, targets."""
    x, weight, target = arguments[:3]
    v, d = weight.shape if call.product.transposed else weight.shape[::-1]
    scalar = call.options["reduction"] != "none"
    dx, dw = (training and t.requires_grad for t in (x, weight))
    db = any(training and bias.requires_grad for bias in arguments[3:])
    dtype, options = call.product.x.dtype, Options(Logits(cap=call.options.get("softcap", 0.0)))
    shifted = applies(options, (dx, dw, db, False), dtype, whole=True, fold=False)
    problem = Problem(
        int(target.numel()), int(d), int(v), dtype, scalar, dx, dw, db, shifted=shifted
    )
    limit = call.memory_limit or MEMORY_LIMIT
    return HeadSizes(problem, choose(problem, limit=limit))


def head_kernels(sizes: HeadSizes) -> tuple[KernelFact, ...]:
    """Forward and backward. A few numbers per token and tile of the vocabulary are left out."""
    found = _forward if sizes.plan.schedule == "forward" else _recompute
    return tuple(found(sizes.problem, sizes.plan))


def _forward(p: Problem, plan: LossPlan) -> Iterator[KernelFact]:
    e = p.dtype.itemsize
    several = plan.rows < p.m
    for m in _pieces(p.m, plan.rows):
        if p.shifted:
            yield _product(p, FORWARD, "e of a chunk", (m, p.v, p.d), e, _SHIFTED)
            rows = m * p.d * e
            yield KernelFact(
                "weighted x", FORWARD, MEMORY, "pointwise", rows, rows, 0, e, formulas=_WEIGHTED
            )
        else:
            yield _product(p, FORWARD, "logits of a chunk", (m, p.v, p.d), e, _STATISTICS)
            chunk = m * p.v * e
            yield KernelFact("dz", FORWARD, MEMORY, "pointwise", chunk, chunk, 0, e, formulas=_DZ)
        added = sum_bytes(p, 1 + several, plan.sum_bits)
        yield from _gradients(p, FORWARD, m, p.v, added, over_tokens=True)
    if several and p.narrow and p.dw and plan.sum_bits >= WIDE:
        yield _rounded("d_weight", FORWARD, p.v * p.d, e)
    for name, wanted, rows in (("d_x", p.dx, p.m), ("d_weight", p.dw, p.v)):
        if wanted:
            size = rows * p.d * e
            scaled = ((name, f"{name} * d_loss"),)
            yield KernelFact(name, BACKWARD, MEMORY, "pointwise", size, size, 0, e, formulas=scaled)


def _recompute(p: Problem, plan: LossPlan) -> Iterator[KernelFact]:
    e = p.dtype.itemsize
    for m in _pieces(p.m, plan.rows):
        yield _product(p, FORWARD, "lse, logit", (m, p.v, p.d), 0, _STATISTICS)
    if not (p.dx or p.dw):
        return
    over_tokens = plan.over == "tokens"
    size = p.m if over_tokens else p.v
    for part in _pieces(size, plan.chunk):
        m, v = (part, p.v) if over_tokens else (p.m, part)
        yield _product(p, BACKWARD, "dz", (m, v, p.d), e, _DZ)
        added = sum_bytes(p, 1 + (part < size))
        yield from _gradients(p, BACKWARD, m, v, added, over_tokens)
    summed, rows, wanted = ("d_weight", p.v, p.dw) if over_tokens else ("d_x", p.m, p.dx)
    if plan.chunk < size and p.narrow and wanted:
        yield _rounded(summed, BACKWARD, rows * p.d, e)


_STATISTICS = (("lse", "logsumexp(z)"), ("logit", "select(z, target)"))
_SHIFTED = (("e", "exp(z - shift)"), ("total", "rowsum(e)"), ("logit", "select(z, target)"))
_WEIGHTED = (("weighted x", "mass / total * x"),)
_DZ = (("dz", "mass * exp(z - lse) - hit * onehot(target, z)"),)


def _gradients(
    p: Problem, phase: str, m: int, v: int, added: int, over_tokens: bool
) -> Iterator[KernelFact]:
    """dx and dW of a chunk; ``added``: bytes per element of the one that is summed over chunks."""
    e = p.dtype.itemsize
    if p.dx:
        yield _product(p, phase, "d_x", (m, p.d, v), e if over_tokens else added)
    if p.dw:
        yield _product(p, phase, "d_weight", (v, p.d, m), added if over_tokens else e)


def _product(
    p: Problem,
    phase: str,
    name: str,
    size: tuple[int, int, int],
    written: int,
    formulas: tuple[tuple[str, str], ...] = (),
) -> KernelFact:
    m, n, k = size
    e = p.dtype.itemsize
    heading = {"d_x": "dz @ weight", "d_weight": "dz.t() @ x"}.get(name, "x @ weight.t()")
    return KernelFact(
        name, phase, GEMM, "gemm", (m + n) * k * e, m * n * written, 2 * m * n * k, e, size,
        heading, (name,) if written else (), formulas,
    )  # fmt: skip


def _rounded(name: str, phase: str, elements: int, e: int) -> KernelFact:
    """A sum over chunks, in fp32, as the gradient it is."""
    formulas = ((name, f"round({name})"),)
    return KernelFact(
        name, phase, MEMORY, "pointwise", 4 * elements, e * elements, 0, e, formulas=formulas
    )


def _pieces(size: int, part: int) -> list[int]:
    return [min(part, size - start) for start in range(0, size, part)]
