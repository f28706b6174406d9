"""The kernels of Hugging Face's Llama decoder layers, run eagerly, by formula.

`cost_table` lists every kernel that forward and backward of the layers launch, with its bytes,
from the definition of the model alone: nothing runs. A test holds it against `trace.KernelTrace`,
kernel by kernel and byte by byte.

Notation: M = batch · seq tokens, d hidden, f feed-forward, D head size, H query heads over G
key-value heads; e bytes per element of the model's dtype, s = 4 bytes per element of the
statistics, which transformers computes in fp32 whatever the dtype. What is written x·y below is
elements read + written.

RMSNorm  y = γ ⊙ cast(x ⊙ rsqrt(mean(x²) + ε)), backward with g = dy:
    dγ = Σ_M g ⊙ x̂        dx̂ = g ⊙ γ        dx = dx̂ ⊙ r + 2 x · (Σ_d dx̂ ⊙ x) · (−r³/2) / d
eight kernels forward and seventeen backward in a 16-bit dtype, six and fifteen in fp32, each a full
pass over M·d elements unless it works on one number per row.

Attention is one opaque kernel each way. It is asked only in which layout it stores
(`AttentionLayout`), because a head-major result must be copied before the next GEMM can read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from codetta.demo.kernels import ATTENTION, GEMM, MEMORY, KernelRow

_STATISTICS = torch.float32
_ADDS_TO_GRADIENT = "add"  # autograd sums the gradients of a value that is used more than once


@dataclass(frozen=True)
class LayerShape:
    """The sizes that the formulas need."""

    batch: int
    seq: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @classmethod
    def of(cls, config: Any, batch: int, seq: int) -> LayerShape:
        """From a transformers LlamaConfig. Biases are not in the formulas, so none may be set."""
        assert not config.attention_bias and not config.mlp_bias
        assert config.hidden_act == "silu"
        return cls(
            batch,
            seq,
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )


@dataclass(frozen=True)
class AttentionLayout:
    """Whether attention stores (batch, seq, head, D) contiguously, whatever shape it reports."""

    output_token_major: bool = True
    grad_value_token_major: bool = True


def attention_layout(
    shape: LayerShape, dtype: torch.dtype, device: torch.device
) -> AttentionLayout:
    """Calls attention once, as transformers does, and looks at the strides of what comes back."""

    def heads(count: int) -> torch.Tensor:
        size = (shape.batch, shape.seq, count, shape.head_dim)
        return torch.zeros(size, dtype=dtype, device=device).transpose(1, 2).requires_grad_()

    q, k, v = heads(shape.heads), heads(shape.kv_heads), heads(shape.kv_heads)
    out = scaled_dot_product_attention(
        q, k, v, is_causal=shape.seq > 1, enable_gqa=shape.heads != shape.kv_heads
    )
    grad = torch.zeros_like(out.transpose(1, 2), memory_format=torch.contiguous_format)
    (dv,) = torch.autograd.grad(out, v, grad.transpose(1, 2))
    return AttentionLayout(out.transpose(1, 2).is_contiguous(), dv.transpose(1, 2).is_contiguous())


def cost_table(
    shape: LayerShape, dtype: torch.dtype, layout: AttentionLayout | None = None
) -> list[KernelRow]:
    """All kernels of all layers, forward and backward, in the order in which one layer launches
    them.

    Every parameter and the input of the first layer require a gradient, and none has one yet.
    """
    layer = _Layer(shape, dtype, layout or AttentionLayout())
    layer.forward()
    layer.backward()
    return layer.rows


class _Layer:
    """Collects the rows of one layer; each method is one module of the layer."""

    def __init__(self, shape: LayerShape, dtype: torch.dtype, layout: AttentionLayout) -> None:
        self.shape, self.layout = shape, layout
        self.e, self.s = dtype.itemsize, _STATISTICS.itemsize
        self.casts = dtype != _STATISTICS
        self.rows: list[KernelRow] = []
        self.where = ""

    def forward(self) -> None:
        p, d, f = self.shape, self.shape.hidden, self.shape.ffn
        q, kv = p.heads * p.head_dim, p.kv_heads * p.head_dim
        self.norm_forward("input_layernorm")
        for name, n in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            self.linear_forward(name, n, d)
        self.rotary_forward("rotary q", p.heads)
        self.rotary_forward("rotary k", p.kv_heads)
        self.attention_forward()
        self.linear_forward("o_proj", d, q)
        self.elementwise("residual", "add", p.tokens * d, inputs=2)
        self.norm_forward("post_attention_layernorm")
        self.linear_forward("gate_proj", f, d)
        self.elementwise("act_fn", "silu", p.tokens * f)
        self.linear_forward("up_proj", f, d)
        self.elementwise("act_fn", "mul", p.tokens * f, inputs=2)
        self.linear_forward("down_proj", d, f)
        self.elementwise("residual", "add", p.tokens * d, inputs=2)

    def backward(self) -> None:
        p, d, f = self.shape, self.shape.hidden, self.shape.ffn
        q, kv = p.heads * p.head_dim, p.kv_heads * p.head_dim
        self.linear_backward("down_proj", d, f)
        self.elementwise("act_fn backward", "mul", p.tokens * f, inputs=2)  # d silu(g)
        self.elementwise("act_fn backward", "mul", p.tokens * f, inputs=2)  # du
        self.linear_backward("up_proj", f, d)
        self.elementwise("act_fn backward", "silu_backward", p.tokens * f, inputs=2)
        self.linear_backward("gate_proj", f, d)
        self.elementwise("gate + up", _ADDS_TO_GRADIENT, p.tokens * d, inputs=2)
        self.norm_backward("post_attention_layernorm backward")
        self.linear_backward("o_proj", d, q)
        self.attention_backward()
        self.rotary_backward("rotary k backward", p.kv_heads)
        self.rotary_backward("rotary q backward", p.heads)
        for name, n in (("v_proj", kv), ("k_proj", kv), ("q_proj", q)):
            self.linear_backward(name, n, d)
        for name in ("v + k", "v + k + q"):
            self.elementwise(name, _ADDS_TO_GRADIENT, p.tokens * d, inputs=2)
        self.norm_backward("input_layernorm backward")

    # ------------------------------------------------------------------------------- modules
    def norm_forward(self, where: str) -> None:
        self.where = where
        M, e, s = self.shape.tokens, self.e, self.s
        d = self.shape.hidden
        Md = M * d
        if self.casts:
            self.memory("_to_copy", Md * e + Md * s)
        self.memory("pow", 2 * Md * s)
        self.memory("mean", Md * s + M * s)
        self.memory("add", 2 * M * s)  # + ε
        self.memory("rsqrt", 2 * M * s)
        self.memory("mul", (Md + M + Md) * s)
        if self.casts:
            self.memory("_to_copy", Md * s + Md * e)
        self.memory("mul", (d + Md + Md) * e)  # γ

    def norm_backward(self, where: str) -> None:
        """Ends with the sum of the gradients along both ways around the norm (the residual)."""
        self.where = where
        M, e, s = self.shape.tokens, self.e, self.s
        d = self.shape.hidden
        Md = M * d
        self.memory("mul", (Md + d + Md) * e)  # dx̂ = g γ
        self.memory("mul", 3 * Md * e)  # g x̂
        self.memory("sum", (Md + d) * e)  # dγ
        if self.casts:
            self.memory("_to_copy", Md * e + Md * s)
        self.memory("mul", 3 * Md * s)  # dx̂ x
        self.memory("mul", (Md + M + Md) * s)  # dx̂ r
        self.memory("sum", (Md + M) * s)  # dr
        self.memory("pow", 2 * M * s)  # r³
        self.memory("mul", 2 * M * s)  # −r³/2
        self.memory("mul", 3 * M * s)
        self.memory("div", (M + Md) * s)  # of the mean, one number per row expanded to d
        self.memory("pow", 2 * Md * s)  # x to the power 1
        self.memory("mul", 2 * Md * s)  # 2 x
        self.memory("mul", 3 * Md * s)
        self.memory(_ADDS_TO_GRADIENT, 3 * Md * s)
        if self.casts:
            self.memory("_to_copy", Md * s + Md * e)
        self.memory(_ADDS_TO_GRADIENT, 3 * Md * e)

    def linear_forward(self, where: str, n: int, k: int) -> None:
        """z = x Wᵀ with W (n, k)."""
        self.where = where
        self.gemm(self.shape.tokens, n, k)

    def linear_backward(self, where: str, n: int, k: int) -> None:
        self.where = f"{where} backward"
        self.gemm(n, k, self.shape.tokens)  # dW = dzᵀ x
        self.gemm(self.shape.tokens, k, n)  # dx = dz W

    def rotary_forward(self, where: str, heads: int) -> None:
        """x cos + rotate_half(x) sin, with cos and sin (seq, D) shared by batch and heads."""
        self.where = where
        x, table = self.shape.tokens * heads * self.shape.head_dim, self._rotary_table()
        self.memory("mul", (2 * x + table) * self.e)  # x cos
        self.memory("neg", x * self.e)  # half of x read and written
        self.memory("cat", 2 * x * self.e)
        self.memory("mul", (2 * x + table) * self.e)  # · sin
        self.memory("add", 3 * x * self.e)

    def rotary_backward(self, where: str, heads: int) -> None:
        self.where = where
        x, table = self.shape.tokens * heads * self.shape.head_dim, self._rotary_table()
        self.memory("mul", (2 * x + table) * self.e)  # g sin
        self.memory("neg", x * self.e)
        for _ in range(2):  # each half goes back into zeros
            self.memory("slice_backward: fill", x * self.e)
            self.memory("slice_backward: copy", x * self.e)
        self.memory(_ADDS_TO_GRADIENT, 3 * x * self.e)
        self.memory("mul", (2 * x + table) * self.e)  # g cos
        self.memory(_ADDS_TO_GRADIENT, 3 * x * self.e)
        self.to_token_major(heads)

    def attention_forward(self) -> None:
        self.where = "attention"
        q, kv, lse = self._attention_bytes()
        self.attention("_scaled_dot_product_flash_attention_for_cpu", 2 * q + 2 * kv + lse)
        if not self.layout.output_token_major:
            self.to_token_major(self.shape.heads)

    def attention_backward(self) -> None:
        """Reads dout, q, k, v, out, lse; writes dq, dk, dv."""
        self.where = "attention backward"
        q, kv, lse = self._attention_bytes()
        name = "_scaled_dot_product_flash_attention_for_cpu_backward"
        self.attention(name, 4 * q + 4 * kv + lse)
        if not self.layout.grad_value_token_major:
            self.to_token_major(self.shape.kv_heads)

    # ------------------------------------------------------------------------------- kernels
    def gemm(self, m: int, n: int, k: int) -> None:
        self._row(GEMM, "mm", (m * k + k * n + m * n) * self.e)

    def memory(self, name: str, moved: int) -> None:
        self._row(MEMORY, name, moved)

    def attention(self, name: str, moved: int) -> None:
        self._row(ATTENTION, name, moved)

    def elementwise(self, where: str, name: str, elements: int, inputs: int = 1) -> None:
        self.where = where
        self.memory(name, (inputs + 1) * elements * self.e)

    def to_token_major(self, heads: int) -> None:
        """(batch, head, seq, D) copied to (batch, seq, head, D), unless the two are the same."""
        if heads > 1 and self.shape.seq > 1:
            self.memory("clone", 2 * self.shape.tokens * heads * self.shape.head_dim * self.e)

    def _attention_bytes(self) -> tuple[int, int, int]:
        """Of q (or out), of k (or v), and of the log-sum-exp (one number per row and head)."""
        p = self.shape
        q, kv = (p.tokens * h * p.head_dim * self.e for h in (p.heads, p.kv_heads))
        return q, kv, p.tokens * p.heads * max(self.e, self.s)

    def _rotary_table(self) -> int:
        return self.shape.seq * self.shape.head_dim

    def _row(self, kind: str, name: str, moved: int) -> None:
        self.rows.append(KernelRow(kind, name, moved, self.shape.layers, self.where))
