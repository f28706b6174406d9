"""The decoder layer that layer.py and kernels.py measure: its shapes, weights and PyTorch code.

It runs from attention output to the next layer's q, k, v, attention excluded: output projection,
residual, RMSNorm, SwiGLU MLP, residual, RMSNorm, q k v projections, rotary embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from measure import device
from torch import Tensor

TOKENS = 16384
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer: hidden d, MLP width f, query and key-value heads."""

    name: str
    d: int
    f: int
    heads: int
    kv_heads: int

    @property
    def head_dim(self) -> int:
        return self.d // self.heads

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def rotated(self) -> int:
        """Columns of q and k."""
        return (self.heads + self.kv_heads) * self.head_dim


SHAPES = [
    Shape("d2048", 2048, 8192, 16, 16),
    Shape("d4096", 4096, 14336, 32, 8),
    Shape("d8192", 8192, 28672, 64, 8),
    Shape("paper2048", 2048, 5632, 16, 16),
    Shape("paper4096", 4096, 11008, 32, 32),
    Shape("paper8192", 8192, 22016, 64, 64),
]
#: For tests of the scripts.
TINY = Shape("tiny", 64, 96, 4, 2)


@dataclass
class Layer:
    """Weights and random inputs of one layer."""

    shape: Shape
    weights: dict[str, Tensor]
    o: Tensor
    x: Tensor
    inv_freq: Tensor
    grad_x: Tensor
    grad_qkv: Tensor

    @staticmethod
    def random(s: Shape, tokens: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Layer:
        torch.manual_seed(seed)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*size, device=device()) * scale).to(dtype)

        kv = s.kv_heads * s.head_dim
        sizes = {
            "wo": (s.d, s.d), "wg": (s.f, s.d), "wu": (s.f, s.d), "wd": (s.d, s.f),
            "wq": (s.d, s.d), "wk": (kv, s.d), "wv": (kv, s.d),
        }  # fmt: skip
        weights = {n: normal(*size, scale=size[1] ** -0.5) for n, size in sizes.items()}
        weights |= {n: 1.0 + normal(s.d, scale=0.1) for n in ("norm_mlp", "norm_attn")}
        for w in weights.values():
            w.requires_grad_()
        exponents = torch.arange(0, s.head_dim, 2, device=device(), dtype=torch.float64)
        return Layer(
            s,
            weights,
            normal(tokens, s.d).requires_grad_(),
            normal(tokens, s.d).requires_grad_(),
            10000.0 ** (-exponents / s.head_dim),
            normal(tokens, s.d),
            normal(tokens, s.qkv),
        )

    @property
    def angles(self) -> Tensor:
        """Rotary angles (tokens, head_dim / 2) in fp32."""
        positions = torch.arange(len(self.x), device=self.x.device, dtype=torch.float64)
        return torch.outer(positions, self.inv_freq).float()

    @property
    def leaves(self) -> dict[str, Tensor]:
        return {**self.weights, "o": self.o, "x": self.x}


def adjacent_columns(s: Shape) -> Tensor:
    """Where each column of [q | k | v] lies when a head's rotated pairs are neighbours.

    Column 2 j of a head is its j-th and column 2 j + 1 its (j + E / 2)-th of rotate-half; v stays.
    Attention scores do not change when q and k are permuted alike, so a contender may keep them so;
    the gradient it is given is then permuted too.
    """
    halves = torch.arange(s.rotated).view(-1, 2, s.head_dim // 2)
    return torch.cat((halves.transpose(1, 2).reshape(-1), torch.arange(s.rotated, s.qkv)))


# --------------------------------------------------------------------------------- as PyTorch
def plain_layer(layer: Layer, norm: Any, gate: Any, rotary: Any) -> tuple[Tensor, Tensor]:
    """The layer as PyTorch code; norm(x, w), gate(g, u) and rotary(q, k) are exchangeable."""
    w, s = layer.weights, layer.shape
    x = layer.x + F.linear(layer.o, w["wo"])
    h = norm(x, w["norm_mlp"])
    x = x + F.linear(gate(F.linear(h, w["wg"]), F.linear(h, w["wu"])), w["wd"])
    h = norm(x, w["norm_attn"])
    q, k, v = (F.linear(h, w[n]) for n in ("wq", "wk", "wv"))
    q, k = (t.view(1, -1, n, s.head_dim) for t, n in ((q, s.heads), (k, s.kv_heads)))
    q, k = rotary(q, k)
    return x, torch.cat((q.reshape(len(x), -1), k.reshape(len(x), -1), v), dim=1)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def silu_gate(g: Tensor, u: Tensor) -> Tensor:
    return F.silu(g) * u


def rotate_half(layer: Layer) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    angles = torch.cat((layer.angles, layer.angles), -1)[None, :, None]
    cos, sin = angles.cos().to(layer.x.dtype), angles.sin().to(layer.x.dtype)

    def turned(t: Tensor) -> Tensor:
        a, b = t.chunk(2, dim=-1)
        return t * cos + torch.cat((-b, a), dim=-1) * sin

    return lambda q, k: (turned(q), turned(k))
