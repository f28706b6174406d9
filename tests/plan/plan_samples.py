"""Sample Plans, written as PyTorch would write the model, and the pipeline that fuses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from codetta.language import columns, moments, rotate, round_to, rowsum, rsqrt, silu
from codetta.language.values import Value
from codetta.plan import Plan, PlanBuilder, Split, differentiate, split
from codetta.plan.rules import (
    layernorm_commutes,
    r1_row_scale,
    r2_column_scale,
    r4_wgrad_row_scale,
    r6_shared_operand,
    r9_orthogonal,
    read_stored,
)

Rule = Callable[[Plan], Plan]
#: What turns a Plan into its fused forward, and the joint Plan into its fused backward.
FORWARD: tuple[Rule, ...] = (r6_shared_operand, r1_row_scale, r2_column_scale)
LAYER_NORM: tuple[Rule, ...] = (r6_shared_operand, layernorm_commutes)
BACKWARD: tuple[Rule, ...] = (r2_column_scale, r4_wgrad_row_scale, read_stored, r9_orthogonal)


def rms_norm(x: Value, weight: Value | None = None, eps: float = 1e-5) -> Value:
    normed = x * rsqrt(rowsum(x * x) / columns(x) + eps)
    return normed if weight is None else normed * weight


def layer_norm(
    x: Value, weight: Value | None = None, bias: Value | None = None, eps: float = 1e-5
) -> Value:
    mean, variance = moments(x)
    normed = (x - mean) * rsqrt(variance + eps)
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias


def decoder_layer(
    d: int = 8, f: int = 12, heads: int = 4, kv_heads: int = 2, head_dim: int = 4, *,
    bias: bool = False, scores_only: bool = False,
) -> Plan:  # fmt: skip
    """From attention output to the next layer's rotated q, k, v: two RMSNorms and a SwiGLU."""
    b = PlanBuilder("layer")
    o, x0 = b.tile("o", "M", heads * head_dim), b.tile("x0", "M", d)
    x1 = round_to(b.mm(o, b.weight("wo", d, heads * head_dim).t()) + x0)
    n1 = rms_norm(x1, b.row("g1", d))
    gate, up = b.mm(n1, b.weight("wg", f, d).t()), b.mm(n1, b.weight("wu", f, d).t())
    x2 = round_to(b.mm(silu(gate) * up, b.weight("wd", d, f).t()) + x1)
    n2 = rms_norm(x2, b.row("g2", d))
    sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    parts: list[Value] = [b.mm(n2, b.weight(f"w{name}", n, d).t()) for name, n in sizes.items()]
    if bias:
        parts = [p + b.row(f"b{n}", int(p.type.cols)) for n, p in zip(sizes, parts, strict=True)]
    qkv = rotate(
        b.emit("cat_cols", *parts), b.rotary("rope"), head_dim=head_dim, heads=heads + kv_heads
    )
    b.output("x2", x2)
    b.output("qkv", qkv, scores_only=scores_only)
    return b.build()


def layer_norm_link(d: int = 8, n: int = 12) -> Plan:
    """x = y Waᵀ + residual, LayerNorm, Linear with bias: the link of a GPT-2 layer."""
    b = PlanBuilder("layer_norm_link")
    x = round_to(b.mm(b.tile("y", "M", d), b.weight("wa", d, d).t()) + b.tile("x0", "M", d))
    normed = layer_norm(x, b.row("g", d), b.row("beta", d))
    b.output("x", x)
    b.output("z", b.mm(normed, b.weight("w", n, d).t()) + b.row("bias", n))
    return b.build()


def applied(plan: Plan, rules: Sequence[Rule]) -> Plan:
    for rule in rules:
        plan = rule(plan)
    return plan


def trainable(plan: Plan) -> list[str]:
    """All inputs that can have a gradient."""
    return [i.name for i in plan.inputs if i.type.kind.value not in ("Rotary", "Index")]


def fused(
    plan: Plan, *, wrt: Sequence[str] | None = None,
    forward: Sequence[Rule] = FORWARD, backward: Sequence[Rule] = BACKWARD,
    cotangents: Sequence[str] | None = None, recompute: bool = True,
) -> Split:  # fmt: skip
    """Forward and backward of ``plan`` after the algebra."""
    plan = applied(plan, forward)
    joint = differentiate(plan, trainable(plan) if wrt is None else wrt, cotangents)
    return split(applied(joint, backward), recompute)
