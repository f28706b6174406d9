"""Random decoders for fuzzing: as a function of parameters, traced without running."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, fx, nn

NORMS = ("rms", "layer", "one_plus", "layer_plain", "layer", "none")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "tanh", "softcap")
LAYOUTS = ("pre", "post", "sandwich", "parallel")
EXTRAS = ("none", "scale", "dropout", "mask", "softcap", "learned")


@dataclass(frozen=True)
class Recipe:
    """What a decoder is made of."""

    norm: str
    activation: str
    layout: str
    extra: str
    heads: tuple[int, int]
    head_dim: int
    rotary: float
    gated: bool
    packed_gate: bool
    packed_qkv: bool
    biases: tuple[bool, bool, bool]
    qk_norm: bool
    noise: bool
    shared: bool
    layers: int
    mlp: int
    batch: int
    tokens: int
    frozen: int


def recipes() -> st.SearchStrategy[Recipe]:
    flag = st.booleans()
    return st.builds(
        Recipe,
        norm=st.sampled_from(NORMS),
        activation=st.sampled_from(ACTIVATIONS),
        layout=st.sampled_from(LAYOUTS),
        extra=st.sampled_from(EXTRAS),
        heads=st.sampled_from([(2, 1), (2, 2), (4, 2), (3, 1), (1, 1)]),
        head_dim=st.sampled_from([4, 8]),
        rotary=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
        gated=flag,
        packed_gate=flag,
        packed_qkv=flag,
        biases=st.tuples(flag, flag, flag),
        qk_norm=flag,
        noise=flag,
        shared=flag,
        layers=st.integers(1, 2),
        mlp=st.sampled_from([6, 8, 12]),
        batch=st.integers(1, 3),
        tokens=st.sampled_from([1, 3, 8, 12]),
        frozen=st.integers(0, 3),
    )


class _Traced:
    """Parameters on demand, each a placeholder of the graph."""

    def __init__(self, recipe: Recipe) -> None:
        self.r = recipe
        self.graph = fx.Graph()
        self.tracer = fx.proxy.GraphAppendingTracer(self.graph)
        self.values: dict[str, Tensor] = {}
        self.proxies: dict[str, fx.Proxy] = {}
        self.generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def placeholder(self, name: str, value: Tensor) -> fx.Proxy:
        if name not in self.proxies:
            last = [n for n in self.graph.nodes if n.op == "placeholder"]
            with self.graph.inserting_after(last[-1]) if last else self.graph.inserting_before():
                node = self.graph.placeholder(name)
            self.values[name], self.proxies[name] = value, fx.Proxy(node, self.tracer)
        return self.proxies[name]

    def parameter(self, name: str, *shape: int) -> fx.Proxy:
        if self.r.shared:
            name = name.split("_", 1)[1]
        kept = (len(self.values) + self.r.frozen) % 4 > 0 or not self.r.frozen
        value = self.random(*shape)
        value = 1 + 0.3 * value if len(shape) == 1 else value * 0.4
        return self.placeholder(name, nn.Parameter(value, requires_grad=kept))


def traced(recipe: Recipe) -> tuple[fx.GraphModule, list[Any]]:
    """The decoder as a graph of PyTorch functions and methods, in fp64."""
    t = _Traced(recipe)
    r, width = recipe, recipe.heads[0] * recipe.head_dim
    x: Any = t.placeholder("x", t.random(r.batch, r.tokens, width).requires_grad_())
    if r.rotary:
        half = int(r.head_dim * r.rotary) // 2
        angles = t.placeholder("angles", t.random(1, r.tokens, half))
        table = torch.cat((angles, angles), dim=-1)
        rope = table.cos().unsqueeze(1), table.sin().unsqueeze(1)
    else:
        rope = None
    for i in range(r.layers):
        x = _layer(t, f"l{i}_", x, rope)
    out = _norm(t, "end_norm", x, width)
    t.graph.output((_linear(t, "end_head", out, width, 5, False).node, out.node))
    module = fx.GraphModule(nn.Module(), t.graph)
    return module, [t.values[n.target] for n in t.graph.nodes if n.op == "placeholder"]


def _layer(t: _Traced, p: str, x: Any, rope: Any) -> Any:
    r, width = t.r, t.r.heads[0] * t.r.head_dim
    if r.layout == "parallel":
        h = _norm(t, p + "norm", x, width)
        return x + _attention(t, p, h, rope) + _mlp(t, p, h)
    for name, part in (("a", lambda h: _attention(t, p, h, rope)), ("m", lambda h: _mlp(t, p, h))):
        h = x if r.layout == "post" else _norm(t, p + name + "norm", x, width)
        y = _extra(t, p + name, part(h), width)
        if r.layout == "sandwich":
            y = _norm(t, p + name + "after", y, width)
        x = x + y
        if r.layout == "post":
            x = _norm(t, p + name + "norm", x, width)
    return x


def _norm(t: _Traced, name: str, x: Any, width: int) -> Any:
    kind = t.r.norm
    if kind == "none":
        return x
    if kind == "layer_plain":
        return F.layer_norm(x, (width,), eps=1e-5)
    w = t.parameter(name + "_w", width)
    if kind == "layer":
        return F.layer_norm(x, (width,), w, t.parameter(name + "_b", width), 1e-5)
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return w * scaled if kind == "rms" else scaled * (1.0 + w)


def _linear(t: _Traced, name: str, x: Any, k: int, n: int, bias: bool) -> Any:
    b = t.parameter(name + "_b", n) if bias else None
    return F.linear(x, t.parameter(name + "_w", n, k), b)


def _attention(t: _Traced, p: str, h: Any, rope: Any) -> Any:
    r = t.r
    (heads, kv), size = r.heads, r.head_dim
    width, sizes = heads * size, [heads * size, kv * size, kv * size]
    if r.packed_qkv:
        q, k, v = _linear(t, p + "qkv", h, width, sum(sizes), r.biases[0]).split(sizes, dim=-1)
    else:
        q, k, v = (
            _linear(t, p + n, h, width, s, r.biases[0])
            for n, s in zip(("q", "k", "v"), sizes, strict=True)
        )
    shape = (r.batch, r.tokens, -1, size)
    if r.noise:
        q, k, v = (y.reshape(r.batch * r.tokens, -1).contiguous() for y in (q, k, v))
    q, k, v = (y.view(shape) for y in (q, k, v))
    if r.qk_norm:
        q, k = (
            y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * t.parameter(p + n, size)
            for y, n in ((q, "qn"), (k, "kn"))
        )
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    if rope is not None:
        q, k = (_rotated(r, y, *rope) for y in (q, k))
    if heads > kv:
        full = (r.batch, kv, heads // kv, r.tokens, size)
        k, v = (y[:, :, None].expand(full) for y in (k, v))
        k, v = (y.reshape(r.batch, heads, r.tokens, size) for y in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = y.transpose(1, 2).reshape(r.batch, r.tokens, width)
    return _linear(t, p + "o", y, width, width, r.biases[1])


def _rotated(r: Recipe, x: Any, cos: Any, sin: Any) -> Any:
    turned = int(r.head_dim * r.rotary)
    rest = x[..., turned:] if turned < r.head_dim else None
    y = x if rest is None else x[..., :turned]
    a, b = y[..., : turned // 2], y[..., turned // 2 :]
    y = y * cos + torch.cat((-b, a), dim=-1) * sin
    return y if rest is None else torch.cat((y, rest), dim=-1)


def _mlp(t: _Traced, p: str, h: Any) -> Any:
    r, width = t.r, t.r.heads[0] * t.r.head_dim
    if r.gated and r.packed_gate:
        gate, up = _linear(t, p + "gu", h, width, 2 * r.mlp, r.biases[2]).chunk(2, dim=-1)
        y = _activated(r, gate) * up
    elif r.gated:
        gate = _activated(r, _linear(t, p + "g", h, width, r.mlp, r.biases[2]))
        y = gate * _linear(t, p + "u", h, width, r.mlp, r.biases[2])
    else:
        y = _activated(r, _linear(t, p + "u", h, width, r.mlp, r.biases[2]))
    return _linear(t, p + "d", y, r.mlp, width, r.biases[1])


def _activated(r: Recipe, x: Any) -> Any:
    return {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
        "relu": F.relu,
        "relu2": lambda y: F.relu(y).square(),
        "tanh": torch.tanh,
        "softcap": lambda y: torch.tanh(y / 3.0) * 3.0,
    }[r.activation](x)


def _extra(t: _Traced, p: str, x: Any, width: int) -> Any:
    r = t.r
    if r.noise:
        x = x.view(-1, width).view(r.batch, r.tokens, width)
    if r.extra == "scale":
        return x * 0.5
    if r.extra == "dropout":
        return F.dropout(x, 0.0, True)
    if r.extra == "mask":
        keep = (torch.arange(r.batch * r.tokens) % 3 > 0).double().view(r.batch, r.tokens, 1)
        return x * t.placeholder("keep", keep)
    if r.extra == "softcap":
        return torch.tanh(x / 30.0) * 30.0
    return x * t.parameter(p + "_gain", width) if r.extra == "learned" else x
