"""The decoder layer as Plans: from attention output to the next layer's q, k and v.

The layer is written down as the model says it (norm, projections, gate, residuals); the algebra
then moves every scale and reduction into the GEMMs' epilogues, and differentiation and scheduling
do the rest. Cutting between attentions, not between layers, lets a norm's producer and consumer
meet in one Plan:

    entry   x                       -> q k v                    (first norm and projections)
    middle  attention output, x     -> x', q k v                (output projection, MLP, next q k v)
    exit    attention output, x     -> x', r = 1 / rms(x')      (last MLP; the head takes x' and r)

Shapes, with M tokens, D = hidden, F = MLP width, H heads of E columns over G key-value heads:
x (M, D), attention output (M, H E), q k v (M, (H + 2 G) E), weights in nn.Linear layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial, reduce

from codetta.language import (
    columns,
    group_sum,
    rotate,
    round_to,
    rowsum,
    rsqrt,
    silu,
    ungroup,
    where,
)
from codetta.language.values import Value
from codetta.plan import Plan, PlanBuilder, Schedule, Split, differentiate, schedule, split
from codetta.plan.rules import (
    narrowed,
    r1_row_scale,
    r2_column_scale,
    r3_frozen_weight,
    r4_wgrad_row_scale,
    r6_shared_operand,
    r9_adjacent_pairs,
    r9_orthogonal,
    read_stored,
)

ENTRY, MIDDLE, EXIT = "entry", "middle", "exit"
#: Pair layouts of gate and up, see :func:`optimized`.
HALVES, ADJACENT = "halves", "adjacent"

Rules = tuple[Callable[[Plan], Plan], ...]


@dataclass(frozen=True)
class Spec:
    """What a segment's Plan depends on; equal layers share one Spec and so one set of schedules.

    Attributes:
        part: 'entry', 'middle' or 'exit'.
        hidden, mlp, heads, kv_heads, head_dim: D, F, H, G, E.
        rotary_dim: columns of a head that are rotated.
        eps: of the norms; eps_mlp of the norm before the MLP (they may differ).
        biases: names of the projections that have one, among wo wg wu wd wq wk wv.
        qk_norm: q and k are normalized per head before the rotation.
    """

    part: str
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    eps: float = 1e-5
    eps_mlp: float = 1e-5
    biases: frozenset[str] = frozenset()
    qk_norm: bool = False

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def segment_plan(spec: Spec) -> Plan:
    """The segment as the model defines it, no algebra applied.

    Inputs: x, o (attention output), rope, weights wo wg wu wd wq wk wv with biases b_<name>, norm
    weights norm_mlp and norm_attn, and for qk_norm: norm_q, norm_k (E each), is_qk (1 for q and k
    columns, 0 for v). Outputs: x_out, qkv, and r of the last norm for 'exit'.
    """
    p = PlanBuilder(spec.part)
    x: Value = p.tile("x", "M", spec.hidden)
    if spec.part != ENTRY:
        x = _attention_output_and_mlp(p, spec, x)
    p.output("x_out", x)  # of 'entry', too: so its gradient meets the residual's inside the Plan
    r = rsqrt(rowsum(x * x) / columns(x) + spec.eps)
    if spec.part == EXIT:
        p.output("r", r)
        return p.build()
    normed = x * r * p.row("norm_attn", spec.hidden)
    # What is rotated is q and k, which reach nothing but attention scores: there is no cache.
    p.output("qkv", _projections(p, spec, normed), scores_only=True)
    return p.build()


def _attention_output_and_mlp(p: PlanBuilder, spec: Spec, x: Value) -> Value:
    o = p.tile("o", "M", spec.heads * spec.head_dim)
    x = round_to(_linear(p, spec, "wo", o, spec.hidden) + x)
    r = rsqrt(rowsum(x * x) / columns(x) + spec.eps_mlp)
    normed = x * r * p.row("norm_mlp", spec.hidden)
    gate = _linear(p, spec, "wg", normed, spec.mlp)
    up = _linear(p, spec, "wu", normed, spec.mlp)
    return round_to(_linear(p, spec, "wd", silu(gate) * up, spec.hidden) + x)


def _projections(p: PlanBuilder, spec: Spec, normed: Value) -> Value:
    q = _linear(p, spec, "wq", normed, spec.heads * spec.head_dim)
    k, v = (_linear(p, spec, w, normed, spec.kv_heads * spec.head_dim) for w in ("wk", "wv"))
    qkv = p.emit("cat_cols", q, k, v)
    if spec.qk_norm:
        qkv = _qk_norm(p, spec, qkv)
    return rotate(
        qkv,
        p.rotary("rope"),
        head_dim=spec.head_dim,
        rotary_dim=spec.rotary_dim,
        heads=spec.heads + spec.kv_heads,
        pairs="halves",
    )


def _qk_norm(p: PlanBuilder, spec: Spec, qkv: Value) -> Value:
    """RMSNorm of each q and k head; v columns pass."""
    norm_q, norm_k = (p.row(n, spec.head_dim) for n in ("norm_q", "norm_k"))
    is_qk = p.row("is_qk", spec.qkv)
    per_head = [norm_q] * spec.heads + [norm_k] * spec.kv_heads + [norm_k] * spec.kv_heads
    weight = p.emit("to_row", p.emit("stack_vectors", *(p.emit("to_col", w) for w in per_head)))
    mean = group_sum(qkv * qkv, spec.head_dim) * (1.0 / spec.head_dim)
    normed = qkv * ungroup(rsqrt(mean + spec.eps), spec.head_dim) * weight
    return where(is_qk > 0.5, normed, qkv)


def _linear(p: PlanBuilder, spec: Spec, name: str, x: Value, n: int) -> Value:
    w = p.weight(name, n, int(x.type.cols))
    z: Value = p.mm(x, w.t())
    return z + p.row(f"b_{name[1:]}", n) if name in spec.biases else z


def head_plan(hidden: int, vocabulary: int) -> Plan:
    """logits = (x ⊙ r ⊙ γ) Wᵀ: the last norm and the head, given r. Run without algebra.

    V is far larger than D, so what the rules save here they would cost many times over: folding γ
    into W moves 2 V D elements to save M D (R2), a row scale moved onto the gradient stores r ⊙
    d_logits, M V elements more (R4), and ⟨z, dz⟩ of the logits would need them saved or computed
    again, while the dgrad's epilogue loads x anyway and has ⟨x γ, d_logits W⟩ for nothing (R3).
    """
    p = PlanBuilder("head")
    x, r = p.tile("x", "M", hidden), p.col("r")
    normed = x * r * p.row("norm", hidden)
    p.output("logits", p.mm(normed, p.weight("head", vocabulary, hidden).t()))
    return p.build()


# ------------------------------------------------------------------------------ preparation
def optimized(plan: Plan, pairs: str = HALVES) -> Plan:
    """Forward algebra: merge shared operands, pull row scales out, fold norm weights.

    With 'halves', gate and up are stacked: their gradients are then two blocks of rows of one
    wgrad's result, and nobody has to copy them apart. With 'adjacent', which the fused backend
    needs, they are interleaved, and rotate-half becomes rotation of adjacent pairs (R9).
    """
    merge = partial(r6_shared_operand, pairs=pairs)
    turn: Rules = (r9_adjacent_pairs,) if pairs == ADJACENT else ()
    return _apply(plan, (merge, r1_row_scale, r2_column_scale, *turn))


#: The backward's algebra, applied to forward and backward together.
BACKWARD: Rules = (
    r2_column_scale,
    r4_wgrad_row_scale,
    read_stored,
    r9_orthogonal,
    r3_frozen_weight,
)


def joint(
    plan: Plan, wrt: Iterable[str], cotangents: Iterable[str], rules: Rules = BACKWARD
) -> Plan:
    """Forward and backward of an optimized Plan, with the backward's algebra applied."""
    return narrowed(_apply(differentiate(plan, tuple(wrt), tuple(cotangents)), rules))


def _apply(plan: Plan, rules: Rules) -> Plan:
    return reduce(lambda p, rule: rule(p), rules, plan)


@dataclass(frozen=True)
class Compiled:
    """Schedules of one segment for one set of wanted gradients."""

    forward: Schedule
    backward: Schedule | None
    saved: tuple[str, ...]


@lru_cache(maxsize=256)
def compiled(
    plan: Plan,
    wrt: tuple[str, ...],
    cotangents: tuple[str, ...],
    rules: Rules = BACKWARD,
    recompute: bool = True,
) -> Compiled:
    """Schedules of an optimized Plan; with an empty ``wrt`` the forward alone, saving nothing.

    ``recompute``: what the forward saves, see :func:`codetta.plan.split`.
    """
    if not wrt or not cotangents:
        return Compiled(schedule(narrowed(plan)), None, ())
    parts: Split = split(joint(plan, wrt, cotangents, rules), recompute)
    backward = schedule(parts.backward, parts.private)
    return Compiled(schedule(parts.forward), backward, parts.saved)


@lru_cache(maxsize=64)
def segment(spec: Spec, pairs: str = HALVES) -> Plan:
    """The optimized Plan of a segment."""
    return optimized(segment_plan(spec), pairs)


@lru_cache(maxsize=16)
def head(hidden: int, vocabulary: int) -> Plan:
    """The Plan of the head; its backward takes no rules either (see :func:`head_plan`)."""
    return head_plan(hidden, vocabulary)
