"""The layer in the paper's form: forward and backward written by hand over epilogue kernels.

The method is that of *CODA: Rewriting Transformer Blocks as GEMM-Epilogue Programs* (Guo et al.,
2026). Every norm's producer also stores x ⊙ γ, so the next GEMM's operand needs no folded weight;
the row scale r is applied in the consumer. In the backward, the dgrad kernel of a norm applies
γ, residual and correction, stores x ⊙ γ again for the weight gradient (or, with ``keep``, it is
kept from the forward: less traffic, more memory), and reduces dγ over M. The SwiGLU backward
recomputes y. Plain GEMMs are cuBLAS, finalizers PyTorch operations, the rotary backward one
compiled function.

The kernels come as an object with one function per epilogue (:class:`Kernels`): QuACK's library on
a GPU (:mod:`quack_kernels`), plain PyTorch in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from layer_model import EPS, Layer, Shape, adjacent_columns
from torch import Tensor

Epilogue = Callable[..., dict[str, Tensor]]


@dataclass(frozen=True)
class Kernels:
    """The epilogues, called as kernel(a, b, c, operand=...) with a (M, K) and b (K, N).

    Vectors over rows come as (1, M), over columns as (1, N); h is acc + c.

        rms_partial       weight            D = h ⊙ weight, resid_out = h, sqsum = rowsum(h²)
        swiglu            rstd              D = acc, postact = silu(g) u of rstd ⊙ acc
        rope              rstd, pos, freq   D = rotation of rstd ⊙ acc
        rms_bwd           y, w, corr        D = acc ⊙ w + c + y ⊙ corr, dw = colsum(acc y)
        rms_bwd_store     the same          and a = y ⊙ w
        dswiglu           rstd              D = r ⊙ (dg, du), postact = y, dsum = ⟨(g, u), (dg, du)⟩
    """

    rms_partial: Epilogue
    swiglu: Epilogue
    rope: Epilogue
    rms_bwd: Epilogue
    rms_bwd_store: Epilogue
    dswiglu: Epilogue
    inv_freq: Callable[[Tensor, int, int], Tensor]
    compile: Callable[[Callable[..., Any]], Callable[..., Any]]


def packed_weights(layer: Layer) -> dict[str, Tensor]:
    """The layer's weights as this form holds them: gate and up interleaved, q k v stacked with
    rotated pairs adjacent. They are its parameters, so packing them costs it nothing."""
    w = {n: t.detach() for n, t in layer.weights.items()}
    gate_up = torch.stack((w["wg"], w["wu"]), dim=1).flatten(0, 1)
    qkv = torch.cat((w["wq"], w["wk"], w["wv"]))[adjacent_columns(layer.shape).to(w["wq"].device)]
    found = {"wo": w["wo"], "gate_up": gate_up, "wd": w["wd"], "qkv": qkv}
    found |= {n: w[n] for n in ("norm_mlp", "norm_attn")}
    return {n: t.clone().requires_grad_() for n, t in found.items()}


def unpacked_gradients(s: Shape, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the packed weights by the names of the plain ones, for comparison."""
    gate_up, qkv = found.pop("gate_up"), found.pop("qkv")
    plain = torch.empty_like(qkv)
    plain[adjacent_columns(s).to(qkv.device)] = qkv
    kv = s.kv_heads * s.head_dim
    wq, wk, wv = plain.split((s.d, kv, kv))
    return found | {"wg": gate_up[0::2], "wu": gate_up[1::2], "wq": wq, "wk": wk, "wv": wv}


def rotary_backward(
    dqkv: Tensor, qkv: Tensor, rstd: Tensor, cos: Tensor, sin: Tensor, rotated: int
) -> tuple[Tensor, Tensor]:
    """(r ⊙ Rᵀ dqkv, ⟨dqkv, qkv⟩); cos and sin are (M, head_dim / 2), the first ``rotated`` columns
    are adjacent pairs of heads, the rest is not rotated."""
    m, half = cos.shape
    d = dqkv.float()
    dot = (d * qkv.float()).sum(1)
    a, b = d[:, :rotated].reshape(m, -1, half, 2).unbind(-1)
    c, s = cos[:, None], sin[:, None]
    turned = torch.stack((a * c + b * s, b * c - a * s), dim=-1).reshape(m, rotated)
    return torch.cat((turned, d[:, rotated:]), 1).mul(rstd[:, None]).to(dqkv.dtype), dot


@dataclass(frozen=True)
class Constants:
    """What a layer's steps share: tables, positions, sizes, and whether x ⊙ γ is kept."""

    kernels: Kernels
    shape: Shape
    cos: Tensor
    sin: Tensor
    pos: Tensor
    freq: Tensor
    rotary_backward: Callable[..., tuple[Tensor, Tensor]]
    keep: bool


def constants(layer: Layer, kernels: Kernels, keep: bool) -> Constants:
    s, angles = layer.shape, layer.angles
    return Constants(
        kernels,
        s,
        angles.cos(),
        angles.sin(),
        torch.arange(len(layer.x), device=layer.x.device, dtype=torch.float32)[None],
        kernels.inv_freq(layer.inv_freq, s.rotated, s.qkv - s.rotated)[None],
        kernels.compile(rotary_backward),
        keep,
    )


class PaperLayer(torch.autograd.Function):
    """(o, x, weights) -> (x, q k v)."""

    @staticmethod
    def forward(ctx: Any, k: Constants, o: Any, x: Any, *weights: Tensor) -> tuple[Tensor, Tensor]:
        wo, gate_up, wd, qkv, norm_mlp, norm_attn = weights
        f = k.kernels
        one = f.rms_partial(o, wo.t(), x, weight=_row(norm_mlp))
        x1, a1, r1 = one["resid_out"], one["D"], _rstd(one["sqsum"], k.shape.d)
        gated = f.swiglu(a1, gate_up.t(), rstd=r1[None])
        two = f.rms_partial(gated["postact"], wd.t(), x1, weight=_row(norm_attn))
        x2, a2, r2 = two["resid_out"], two["D"], _rstd(two["sqsum"], k.shape.d)
        out = f.rope(a2, qkv.t(), rstd=r2[None], pos=k.pos, freq=k.freq)["D"]
        kept = (a1, a2) if k.keep else ()
        ctx.save_for_backward(o, *weights, x1, r1, gated["D"], x2, r2, out, *kept)
        ctx.constants = k
        return x2, out

    @staticmethod
    def backward(ctx: Any, dx2: Tensor, dqkv: Tensor) -> tuple[Any, ...]:
        k: Constants = ctx.constants
        o, wo, gate_up, wd, qkv, norm_mlp, norm_attn, x1, r1, z, x2, r2, out, *kept = (
            ctx.saved_tensors
        )
        f, d = k.kernels, k.shape.d
        dz, dot = k.rotary_backward(dqkv, out, r2, k.cos, k.sin, k.shape.rotated)
        apply = f.rms_bwd if k.keep else f.rms_bwd_store
        corr = (-(r2 * r2) * dot / d)[None]
        two = apply(dz, qkv, dx2, y=x2, w=_row(norm_attn), corr=corr)
        dx2 = two["D"]
        d_qkv = dz.t() @ (kept[1] if k.keep else two["a"])
        d_norm_attn = two["dw"].reshape(-1).to(norm_attn.dtype)
        del dz, two
        gated = f.dswiglu(dx2, wd, z, rstd=r1[None])
        d_wd = dx2.t() @ gated["postact"]
        dgu, corr = gated["D"], (-(r1**3) * gated["dsum"].reshape(-1) / d)[None]
        del gated
        one = apply(dgu, gate_up, dx2, y=x1, w=_row(norm_mlp), corr=corr)
        d_gate_up = dgu.t() @ (kept[0] if k.keep else one["a"])
        dx1, d_norm_mlp = one["D"], one["dw"].reshape(-1).to(norm_mlp.dtype)
        del dgu, one
        weights = (dx1.t() @ o, d_gate_up, d_wd, d_qkv, d_norm_mlp, d_norm_attn)
        return None, dx1 @ wo, dx1, *weights


def _rstd(squares: Tensor, d: int) -> Tensor:
    return torch.rsqrt(squares.reshape(-1) / d + EPS)


def _row(w: Tensor) -> Tensor:
    return w.detach().float()[None]
