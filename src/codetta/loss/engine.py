"""The passes of the loss head over canonical tensors: no checks, no autograd.

Tensors as in :class:`codetta.loss.head.Leaves`, target (M,) of rows of the weight, scale (M,) in
fp32 or fp64: the factor of each token's loss, 0 where it is ignored. All GEMMs and pointwise passes
are programs, so this runs on every backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from codetta.language import Program
from codetta.loss import shifted
from codetta.loss.epilogues import derivative, statistics, stored_derivative
from codetta.loss.head import Gradients, Head
from codetta.loss.options import Need
from codetta.loss.plan import LossPlan
from codetta.loss.sums import Sums
from codetta.loss.vocabulary import WHOLE, Statistics
from codetta.ops import run_gemm, run_pointwise


@dataclass(frozen=True, slots=True)
class Forward:
    """What a forward pass leaves.

    Attributes:
        losses: of each token, before its factor (M,).
        lse: (M,).
        hit: whether no logit exceeds the target's, (M,) bool, if that was asked for.
        logits: (M, V) if they were asked for.
        slopes: derivatives of losses and lse by the row scale, (M,) each, if asked for.
        gradients: of Σ scale loss, if they were formed.
    """

    losses: Tensor
    lse: Tensor
    hit: Tensor | None
    logits: Tensor | None
    slopes: tuple[Tensor, Tensor] | None
    gradients: Gradients | None


def forward(head: Head, scale: Tensor, plan: LossPlan, need: Need) -> Forward:
    """Losses of all tokens, and with the schedule 'forward' the gradients ``need`` asks for."""
    m, options = head.x.shape[0], head.options
    smooth, slopes = options.smoothing != 0, options.slopes
    found = {"lse": True, "logit": True, "total": smooth, "top": options.accuracy}
    found |= {"mean_slope": slopes, "target_slope": slopes, "total_slope": slopes and smooth}
    whole = {n: head.x.new_empty(m, dtype=head.compute) for n, wanted in found.items() if wanted}
    if options.keep_logits:
        whole["logits"] = head.x.new_empty(m, len(head.weight))
    sums = None
    if plan.schedule == "forward" and any(need):
        sums = Sums(head, need, plan, -(-m // plan.rows))
    shifting = sums is not None and shifted.head_applies(head, need)
    base = shifted.shifts(head) if shifting else None

    def chunk(start: int) -> None:  # its tensors must be gone when the next one begins
        rows = slice(start, start + plan.rows)
        part = head.rows(rows.start, rows.stop).folded()
        if shifting:
            assert sums is not None and base is not None
            found, e, factor = shifted.chunk(part, base[rows], scale[rows])
            for name, values in whole.items():
                values[rows] = found[name]
            sums.add_shifted(part, start, e, factor)
            return
        made, local = _statistics(part, sums is not None)
        for name, values in whole.items():
            values[rows] = made[name]
        if sums is not None:
            sums.add(part, start, *_stored_derivative(part, made, local, scale[rows], need[2]))

    for start in range(0, m, plan.rows):
        chunk(start)
    hit = whole["logit"] >= whole["top"] if options.accuracy else None
    gradients = None if sums is None else sums.result()
    by_row_scale = (_loss_slopes(head, whole), whole["mean_slope"]) if slopes else None
    losses, logits = _losses(head, whole), whole.get("logits")
    return Forward(losses, whole["lse"], hit, logits, by_row_scale, gradients)


def backward(
    head: Head,
    lse: Tensor,
    scale: Tensor,
    lse_gradient: Tensor | None,
    plan: LossPlan,
    need: Need,
) -> Gradients:
    """Gradients of Σ scale loss + Σ lse_gradient lse, the logits computed again."""
    vectors = (lse + 0.0 * lse, *_masses(head, lse, scale, lse_gradient))  # NaN, not infinite
    program = derivative(head.options.logits, len(vectors) == 4, need[2])
    tokens = plan.over == "tokens"
    size = len(head.x) if tokens else len(head.weight)
    sums = Sums(head, need, plan, -(-size // plan.chunk))

    def chunk(part: Head, start: int, rows: slice) -> None:  # gone when the next one begins
        operands = [*part.vectors, part.target[:, None], *(x[rows, None] for x in vectors)]
        sums.add(part, start, *run_gemm(program, part.operand, part.weight.t(), operands))

    whole = head if tokens else head.folded()
    for start in range(0, size, plan.chunk):
        stop = start + plan.chunk
        if tokens:
            chunk(head.rows(start, stop).folded(), start, slice(start, stop))
        else:
            chunk(whole.columns(start, stop), start, slice(None))
    return sums.result()


# --------------------------------------------------------------------------------- one chunk
def _statistics(part: Head, kept: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Over the whole vocabulary, and over what is here."""
    options = part.options
    rounded = part.x.dtype.itemsize < part.compute.itemsize
    stored = ("rounded" if rounded else "exact") if kept else ""
    program = statistics(
        options.logits, options.smoothing != 0, options.accuracy, options.keep_logits,
        options.slopes, stored,
    )  # fmt: skip
    operands = [*part.vectors, part.target[:, None]]
    results = run_gemm(program, part.operand, part.weight.t(), operands)
    local = _named(program, results)
    if part.vocabulary is WHOLE:
        return local, local
    made = part.vocabulary.combined(Statistics.of(local)).named
    if kept:
        stored_part = Statistics(local["stored_lse"], local["logit"])
        made["stored_lse"] = part.vocabulary.combined(stored_part).lse
    return made, local


def _losses(head: Head, found: dict[str, Tensor]) -> Tensor:
    """lse − (1 − ε) z_target − ε mean(z) + z_loss lse²; NaN where lse is infinite."""
    options, lse = head.options, found["lse"]
    losses = (lse + 0.0 * lse) - (1.0 - options.smoothing) * found["logit"]
    if options.smoothing:
        losses = losses - (options.smoothing / head.words) * found["total"]
    if options.z_loss:
        losses = losses + options.z_loss * lse.square()
    return losses


def _loss_slopes(head: Head, found: dict[str, Tensor]) -> Tensor:
    """The derivative of :func:`_losses` by the row scale."""
    options, mean = head.options, found["mean_slope"]
    slopes = mean * (1.0 + 2.0 * options.z_loss * found["lse"]) if options.z_loss else mean
    slopes = slopes - (1.0 - options.smoothing) * found["target_slope"]
    if options.smoothing:
        slopes = slopes - (options.smoothing / head.words) * found["total_slope"]
    return slopes


def _masses(
    head: Head, lse: Tensor, scale: Tensor, lse_gradient: Tensor | None
) -> tuple[Tensor, ...]:
    """The numbers of each row in dz = mass p − hit onehot − flat."""
    options = head.options
    mass = scale * (1.0 + 2.0 * options.z_loss * lse) if options.z_loss else scale
    if lse_gradient is not None:
        mass = mass + lse_gradient
    if not options.smoothing:
        return mass, scale
    return mass, scale * (1.0 - options.smoothing), scale * (options.smoothing / head.words)


def _stored_derivative(
    part: Head, made: dict[str, Tensor], local: dict[str, Tensor], scale: Tensor, bias: bool
) -> list[Tensor]:
    """dz from the stored z, and its sum over the rows if ``bias``."""
    masses = _masses(part, made["lse"], scale, None)
    program = stored_derivative(part.options.logits, len(masses) == 3, bias)
    z = local.pop("logits")  # the last reference, unless it is returned
    vectors = (part.target, made["stored_lse"], *masses)
    m, v = z.shape
    operands = [z, *part.row_vectors, *(x[:, None] for x in vectors)]
    return run_pointwise(program, operands, m, v, part.x.dtype, part.compute)


def _named(program: Program, results: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip((o.name for o in program.outputs), results, strict=True))
