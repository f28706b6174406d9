"""Who is measured in layer.py, each made from the same Layer.

A contender is a function from a Layer to a :class:`Contender`. What is only imported by one is
imported in its function, so that a missing package costs only that contender.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from layer_model import (
    EPS,
    Layer,
    adjacent_columns,
    plain_layer,
    rms_norm,
    rotate_half,
    silu_gate,
)
from torch import Tensor


@dataclass
class Contender:
    """One way to compute the layer.

    Attributes:
        forward: () -> (x, q k v), with a graph for autograd.
        leaves: what gets a gradient, by name.
        cotangents: gradients of the two outputs.
        named: its gradients by the names of the plain layer's leaves.
    """

    forward: Callable[[], tuple[Tensor, Tensor]]
    leaves: dict[str, Tensor]
    cotangents: tuple[Tensor, Tensor]
    named: Callable[[dict[str, Tensor]], dict[str, Tensor]] = field(default=lambda found: found)

    def clear(self) -> None:
        for x in self.leaves.values():
            x.grad = None

    def both(self) -> None:
        """Forward and backward; the gradients end in ``.grad``, as for an optimizer.

        They are cleared first: AccumulateGrad then keeps a gradient laid out as its parameter and
        copies any other, so whoever returns strided views pays for it here.
        """
        self.clear()
        torch.autograd.backward(self.forward(), self.cotangents)


def _plain(layer: Layer, forward: Callable[[], tuple[Tensor, Tensor]]) -> Contender:
    return Contender(forward, layer.leaves, (layer.grad_x, layer.grad_qkv))


def eager(layer: Layer) -> Contender:
    rotary = rotate_half(layer)
    return _plain(layer, lambda: plain_layer(layer, rms_norm, silu_gate, rotary))


def compiled(layer: Layer, mode: str = "default") -> Contender:
    forward = torch.compile(eager(layer).forward, fullgraph=True, dynamic=False, mode=mode)
    return _plain(layer, forward)


def max_autotune(layer: Layer) -> Contender:
    return compiled(layer, "max-autotune-no-cudagraphs")


def liger(layer: Layer) -> Contender:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    angles = torch.cat((layer.angles, layer.angles), -1)[None]
    cos, sin = angles.cos().to(layer.x.dtype), angles.sin().to(layer.x.dtype)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)

    def rotary(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    return _plain(layer, lambda: plain_layer(layer, norm, LigerSiLUMulFunction.apply, rotary))


def coda(
    layer: Layer, weights: dict[str, Tensor] | None = None, recompute: bool = True
) -> Contender:
    """``weights``: others than the layer's own, by its names."""
    from codetta.nn.block import ADJACENT, MIDDLE, Spec, segment
    from codetta.nn.function import apply_plan

    s = layer.shape
    spec = Spec(MIDDLE, s.d, s.f, s.heads, s.kv_heads, s.head_dim, s.head_dim, EPS, EPS)
    plan = segment(spec, ADJACENT)
    if layer.x.is_cuda and SERIAL not in os.environ:
        compile_together(plan, spec, len(layer.x), layer.x.dtype, recompute)
    table = torch.cat((layer.angles.cos(), layer.angles.sin()), dim=1)
    rope = (table, torch.arange(len(layer.x), device=layer.x.device))
    weights = layer.weights if weights is None else weights
    leaves = {**weights, "o": layer.o, "x": layer.x}
    given: dict[str, Any] = {**leaves, "rope": rope}

    def forward() -> tuple[Tensor, Tensor]:
        inputs = {i.name: given[i.name] for i in plan.inputs}
        out = apply_plan(plan, inputs, recompute=recompute)
        return out["x_out"], out["qkv"]

    return Contender(forward, leaves, _adjacent(layer))


def coda_packed(layer: Layer, recompute: bool = True) -> Contender:
    """With gate and up in one storage, their rows in turns, as ``codetta.compile(pack=True)`` has
    them. q, k and v stay apart, as there: the rotation permutes rows of q and k."""
    whole = torch.stack((layer.weights["wg"].detach(), layer.weights["wu"].detach()), dim=1)
    apart = {n: whole[:, i].requires_grad_() for i, n in enumerate(("wg", "wu"))}
    return coda(layer, {**layer.weights, **apart}, recompute)


def coda_kept(layer: Layer) -> Contender:
    """Packed, and with SwiGLU's output kept for the backward (``recompute=False``)."""
    return coda_packed(layer, recompute=False)


def compile_together(
    plan: Any, spec: Any, tokens: int, dtype: torch.dtype, recompute: bool
) -> None:
    """Compile CODA's GEMM kernels in worker processes; what fails there the first step tries."""
    from codetta.tuning.precompile import compile_calls, plan_calls

    calls = plan_calls(plan, spec, tokens, dtype, recompute=recompute)
    print(f"  coda: {compile_calls(calls, torch.cuda.current_device())}", flush=True)


def paper(layer: Layer, keep: bool = False, kernels: Any = None) -> Contender:
    from paper_form import PaperLayer, constants, packed_weights, unpacked_gradients

    if kernels is None:
        from quack_kernels import paper_kernels

        kernels = paper_kernels()
    shared, weights = constants(layer, kernels, keep), packed_weights(layer)
    names = ("wo", "gate_up", "wd", "qkv", "norm_mlp", "norm_attn")

    def forward() -> tuple[Tensor, Tensor]:
        return PaperLayer.apply(shared, layer.o, layer.x, *(weights[n] for n in names))

    return Contender(
        forward,
        weights | {"o": layer.o, "x": layer.x},
        _adjacent(layer),
        lambda found: unpacked_gradients(layer.shape, dict(found)),
    )


def paper_kept(layer: Layer) -> Contender:
    return paper(layer, keep=True)


def _adjacent(layer: Layer) -> tuple[Tensor, Tensor]:
    columns = adjacent_columns(layer.shape).to(layer.grad_qkv.device)
    return layer.grad_x, layer.grad_qkv[:, columns].contiguous()


#: Set in the environment where CODA's kernels are to be compiled one by one.
SERIAL = "CODETTA_BENCH_SERIAL"

CONTENDERS: dict[str, Callable[[Layer], Contender]] = {
    "eager": eager,
    "torch.compile": compiled,
    "torch.compile max-autotune": max_autotune,
    "liger": liger,
    "paper form": paper,
    "paper form, x·γ kept": paper_kept,
    "coda": coda,
    "coda, packed": coda_packed,
    "coda, packed, y kept": coda_kept,
}
#: Contenders that run only where they are named.
ASKED_FOR = frozenset({"torch.compile max-autotune"})

Product = Callable[[Tensor, Tensor], Tensor]


def floor(layer: Layer, product: Product = torch.matmul) -> tuple[Callable[[], None], ...]:
    """The layer's plain GEMMs by ``product``: forward (4), and forward + backward (12)."""
    s, w = layer.shape, {n: t.detach() for n, t in layer.weights.items()}
    up, qkv = torch.cat((w["wg"], w["wu"])), torch.cat((w["wq"], w["wk"], w["wv"]))
    x, o = layer.x.detach(), layer.o.detach()
    y, dz = (torch.randn(len(x), n, device=x.device).to(x.dtype) for n in (s.f, 2 * s.f))
    weights = [(o, w["wo"]), (x, up), (y, w["wd"]), (x, qkv)]
    grads = [layer.grad_x, dz, layer.grad_x, layer.grad_qkv]

    def forward() -> None:
        for a, b in weights:
            product(a, b.t())

    def both() -> None:
        forward()
        for (a, b), g in zip(weights, grads, strict=True):
            product(g, b)
            product(g.t(), a)

    return forward, both
