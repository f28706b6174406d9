"""Measure the numbers of docs/dead-ends.md: `python tools/measure_dead_ends.py [NAME ...]`.

Each function tries a form that was rejected beside the one that was kept and returns rows of
(setting, rejected, kept). CPU, fixed seeds, a few seconds in all; the same numbers on every run.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from codetta.backends.reference import execute
from codetta.language import Program
from codetta.language.meaning import Context
from codetta.language.types import Kind
from codetta.programs import layernorm_apply, row_layernorm

M, D, N = 256, 1024, 256
RATIOS = (1, 10, 100, 1000)
Row = tuple[str, float, float]


def run(program: Program, like: Tensor, acc: Tensor | None = None, **operands: Tensor):
    """Outputs of a program on natural shapes, with a bf16 or fp32 operand dtype."""
    shape = {Kind.COL: (-1, 1), Kind.ROW: (1, -1)}
    flat = {
        o.name: operands[o.name].reshape(shape.get(o.kind, operands[o.name].shape))
        for o in program.operands
    }
    m, n = acc.shape if acc is not None else like.shape
    context = Context(m, n, like.dtype, torch.float32, torch.device("cpu"))
    return execute(program, context, flat, acc=acc)[0]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def variance_from_sums() -> list[Row]:
    """Largest relative error of a row's variance in fp32: Σx and Σx², against Chan partials."""
    rows = []
    for ratio in RATIOS:
        x = (normal(M, D, seed=ratio) + ratio).float()
        exact = x.double().var(1, correction=0)
        sums = x.pow(2).mean(1) - x.mean(1).pow(2)
        kept = 1 / run(row_layernorm(0.0), x, x=x)["r"].double().pow(2)
        error = [((v.double() - exact).abs() / exact).max() for v in (sums, kept)]
        rows.append((f"|mean| / std = {ratio}", float(error[0]), float(error[1])))
    return rows


def s_from_unrounded_weight() -> list[Row]:
    """Error of LayerNorm + Linear in bf16, over PyTorch's own: s summed from W ⊙ γ before and
    after it is rounded to bf16."""
    rows = []
    for ratio in RATIOS:
        x = (normal(M, D, seed=ratio) + ratio).bfloat16()
        gamma, beta = (1 + 0.1 * normal(D, seed=1)).bfloat16(), normal(D, seed=2).bfloat16()
        w = (normal(N, D, seed=3) / D**0.5).bfloat16()
        exact = F.layer_norm(x.double(), (D,), gamma.double(), beta.double()) @ w.double().T
        plain = F.layer_norm(x, (D,), gamma, beta) @ w.T
        folded = w * gamma
        acc, t = x.float() @ folded.float().T, w.float() @ beta.float()
        stats = run(row_layernorm(1e-5), x, x=x)
        error = []
        for summed in (w.float() * gamma.float(), folded.float()):
            ours = run(layernorm_apply, x, acc, **stats, s=summed.sum(1), t=t)["result"]
            error.append(relative(ours, exact) / relative(plain, exact))
        rows.append((f"|mean| / std = {ratio}", error[0], error[1]))
    return rows


def maximum_of_the_forward() -> list[Row]:
    """Share of rows that find their maximum again in the accumulator saved in bf16: looking for
    the forward's fp32 maximum, and taking the maximum anew."""
    acc = normal(M, D, seed=0).float()
    saved = acc.bfloat16().float()
    forward = (saved == acc.amax(1, keepdim=True)).any(1)
    again = (saved == saved.amax(1, keepdim=True)).any(1)
    return [("bf16, 1024 columns", float(forward.float().mean()), float(again.float().mean()))]


def unrounded_accumulator() -> list[Row]:
    """Relative error of the gradient of gelu(a b) with respect to a, everything in bf16: with the
    accumulator saved in fp32, and in bf16."""
    a, b = normal(M, D, seed=0).bfloat16(), (normal(D, N, seed=1) / D**0.5).bfloat16()
    dy = normal(M, N, seed=2).bfloat16()

    def gradient(z: Tensor, dtype: torch.dtype) -> Tensor:
        z = z.detach().requires_grad_()
        (dz,) = torch.autograd.grad(F.gelu(z), z, dy.to(z.dtype))
        return dz.to(dtype).to(z.dtype) @ b.to(z.dtype).T

    exact = gradient(a.double() @ b.double(), torch.float64)
    acc = a.float() @ b.float()
    errors = [
        relative(gradient(z, torch.bfloat16).bfloat16(), exact)
        for z in (acc, acc.bfloat16().float())
    ]
    return [("saved: 4 and 2 bytes an element", errors[0], errors[1])]


def scaled_gradient_in_fp16() -> list[Row]:
    """Share of elements that are zero in the fp16 store of r ⊙ dz, and of dz, at |dz| near 1e-5."""
    rows = []
    for size in (1, 100, 10000):
        dz = 1e-5 * normal(M, N, seed=0).float()
        lost = [float((v.half() == 0).float().mean()) for v in (dz / size, dz)]
        rows.append((f"rms of x = {size}", lost[0], lost[1]))
    return rows


def u_from_y_and_g() -> list[Row]:
    """Relative error of u in SwiGLU's backward: y / silu(g) from y and g as stored, and saved."""
    rows = []
    for dtype in (torch.bfloat16, torch.float16):
        for center in (1, -5, -10, -20):
            g, u = normal(M, N, seed=0) * 0.1 + center, normal(M, N, seed=1)
            y = (F.silu(g) * u).to(dtype)
            again = y.double() / F.silu(g.to(dtype).double())
            name = str(dtype).removeprefix("torch.")
            rows.append((f"{name}, g near {center}", relative(again, u), relative(u.to(dtype), u)))
    return rows


MEASUREMENTS = {
    f.__name__: f
    for f in (
        variance_from_sums,
        s_from_unrounded_weight,
        maximum_of_the_forward,
        unrounded_accumulator,
        scaled_gradient_in_fp16,
        u_from_y_and_g,
    )
}


def main(names: list[str]) -> None:
    for name in names or MEASUREMENTS:
        measure = MEASUREMENTS[name]
        print(f"{name}: {' '.join((measure.__doc__ or '').split())}")
        for setting, rejected, kept in measure():
            print(f"  {setting:32} rejected {rejected:9.2g}   kept {kept:9.2g}")


if __name__ == "__main__":
    main(sys.argv[1:])
