"""Random decoder-like Plans: a stream through norms, gates, activations, residuals and heads."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from plan_samples import layer_norm, rms_norm

from codetta.language import (
    gelu,
    group_mean,
    relu,
    rotate,
    round_to,
    rsqrt,
    silu,
    softcap,
    tanh,
    ungroup,
    unpack,
    where,
)
from codetta.language.values import Value
from codetta.plan import Plan, PlanBuilder

SIZES = st.integers(1, 7)
ACTIVATIONS = {
    "silu": silu, "gelu": gelu, "tanh": tanh, "softcap": lambda x: softcap(x, 2.0),
    "relu": relu, "none": lambda x: x,
}  # fmt: skip
PAIRS = st.sampled_from(("adjacent", "halves"))
BLOCKS = ("linear", "residual", "gate", "pairs", "mlp", "scale", "heads", "columns")


class _Writer:
    """Adds one random block after another to a stream."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw, self.b = draw, PlanBuilder("random")
        self.count = 0
        self.x: Value = self.b.tile("x", "M", draw(SIZES))

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    @property
    def width(self) -> int:
        return int(self.x.type.cols)

    def linear(self, x: Value, n: int) -> Value:
        b = self.b
        z: Value = b.mm(x, b.weight(self.name("w"), n, int(x.type.cols)).t())
        return z + b.row(self.name("b"), n) if self.draw(st.booleans()) else z

    def normed(self) -> Value:
        kind = self.draw(st.sampled_from(("rms", "layer", "none")))
        weight = self.weight()
        if kind == "none":
            return self.x if weight is None else self.x * weight
        if kind == "rms":
            return rms_norm(self.x, weight, eps=1e-2)
        shift = self.b.row(self.name("s"), self.width) if self.draw(st.booleans()) else None
        return layer_norm(self.x, weight, shift, eps=1e-2)

    def weight(self) -> Value | None:
        """γ, 1 + γ, s γ with a trained number s, or none."""
        kind = self.draw(st.sampled_from(("plain", "one plus", "scaled", "none")))
        if kind == "none":
            return None
        weight: Value = self.b.row(self.name("g"), self.width)
        if kind == "one plus":
            return 1.0 + weight
        return weight * self.b.scalar(self.name("a")) if kind == "scaled" else weight

    def activation(self, x: Value) -> Value:
        return ACTIVATIONS[self.draw(st.sampled_from(sorted(ACTIVATIONS)))](x)

    def block(self, kind: str) -> None:
        x = self.normed()
        if kind == "linear":
            self.x = self.linear(x, self.draw(SIZES))
        elif kind == "residual":
            self.x = round_to(self.activation(self.linear(x, self.width)) + self.x)
        elif kind == "gate":
            n = self.draw(SIZES)
            gate, up = self.linear(x, n), self.linear(x, n)
            self.x = self.linear(self.activation(gate) * up, self.width) + self.x
        elif kind == "mlp":
            self.x = self.linear(
                self.activation(self.linear(x, self.draw(SIZES))), self.draw(SIZES)
            )
        elif kind == "pairs":
            gate, up = unpack(self.linear(x, 2 * self.draw(SIZES)), self.draw(PAIRS))
            self.x = self.activation(gate) * up
        elif kind == "scale":
            self.x = 0.5 * x * self.b.col(self.name("c"))
        elif kind == "columns":
            parts = [self.activation(self.linear(x, self.draw(SIZES))), self.x]
            self.x = self.b.emit("cat_cols", *parts)
        else:
            self.heads(x)

    def heads(self, x: Value) -> None:
        head_dim = 2 * self.draw(st.integers(1, 2))
        q, kv = self.draw(st.integers(1, 2)), 1
        parts = [self.linear(x, n * head_dim) for n in (q, kv, kv)]
        qkv = self.b.emit("cat_cols", *parts)
        if self.draw(st.booleans()):
            qkv = self.head_norm(qkv, head_dim)
        self.x = rotate(
            qkv, self.b.rotary("rope"), head_dim=head_dim,
            rotary_dim=2, heads=q + kv, pairs=self.draw(PAIRS),
        )  # fmt: skip
        if self.draw(st.booleans()):
            self.b.output(self.name("qkv"), self.x)

    def head_norm(self, qkv: Value, head_dim: int) -> Value:
        """RMSNorm of each head, for the columns that a parameter marks."""
        mean = group_mean(qkv * qkv, head_dim)
        normed = qkv * ungroup(rsqrt(mean + 1e-2), head_dim)
        return where(self.b.row(self.name("m"), int(qkv.type.cols)) > 0.0, normed, qkv)


@st.composite
def plans(draw: st.DrawFn, max_blocks: int = 3) -> Plan:
    """A Plan of one to ``max_blocks`` random blocks; sizes from 1 on, every output reached."""
    writer = _Writer(draw)
    for kind in draw(st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=max_blocks)):
        writer.block(kind)
    writer.b.output("y", writer.x)
    return writer.b.build()


#: Tokens, including a single one.
TOKENS = st.integers(1, 6)


def examples(count: int) -> settings:
    """This many random examples, the same ones in every run."""
    return settings(
        max_examples=count, deadline=None, derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
