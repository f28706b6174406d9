"""The contenders of the fp8 benchmark, their inputs, and how wrong they may be."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from measure import device
from torch import Tensor

import codetta
from codetta import programs
from codetta.language.program import Program

CHECKED_ROWS = 512
BASE = "scaled_mm"
Run = Callable[[], Any]


@dataclass(frozen=True)
class Inputs:
    """a (M, K) and b (K, N) in e4m3, b the transpose of a weight; scales, a bias and a scale."""

    a: Tensor
    b: Tensor
    sa: Tensor
    sb: Tensor
    bias: Tensor
    scale: float

    @staticmethod
    def random(m: int, n: int, k: int, seed: int) -> Inputs:
        generator = torch.Generator(device()).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device(), generator=generator)

        a, sa = quantized(normal(m, k))
        w, sb = quantized(normal(n, k))
        return Inputs(a, w.t(), sa, sb, normal(n), 448.0 / (6.0 * k**0.5))

    def exact(self, rows: int) -> Tensor:
        scale = self.sa[:rows, None].double() * self.sb.double()
        return (self.a[:rows].double() @ self.b.double()) * scale


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """x by rows: (e4m3, scale) with x ≈ scale ⊙ e4m3."""
    scale = x.abs().amax(1) / 448.0
    return (x / scale[:, None]).to(torch.float8_e4m3fn), scale


def by_row(x: Inputs) -> Tensor:
    return scaled_mm(x, x.sa[:, None], x.sb[None, :])


def by_tensor(x: Inputs) -> Tensor:
    return scaled_mm(x, x.sa[0].clone(), x.sb[0].clone())


def scaled_mm(x: Inputs, sa: Tensor, sb: Tensor) -> Tensor:
    found: Tensor = torch._scaled_mm(
        x.a, x.b, scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return found


def scaled(x: Inputs) -> Any:
    return codetta.gemm(x.a, x.b, programs.fp8_scaled, sa=x.sa, sb=x.sb)


def with_bias(x: Inputs) -> Any:
    return codetta.gemm(x.a, x.b, programs.fp8_scaled_bias, sa=x.sa, sb=x.sb, bias=x.bias)


def stored_in_fp8(x: Inputs) -> Any:
    program = programs.fp8_quantized("e4m3")
    return codetta.gemm(x.a, x.b, program, sa=x.sa, sb=x.sb, scale=x.scale)


CONTENDERS: dict[str, Callable[[Inputs], Any]] = {
    BASE: by_row,
    "scaled_mm tensor": by_tensor,
    "coda": scaled,
    "coda bias": with_bias,
    "coda e4m3": stored_in_fp8,
}
PROGRAMS: dict[str, Program] = {
    "coda": programs.fp8_scaled,
    "coda bias": programs.fp8_scaled_bias,
    "coda e4m3": programs.fp8_quantized("e4m3"),
}


def cycled(contender: Callable[[Inputs], Any], inputs: list[Inputs]) -> Run:
    turn = itertools.cycle(inputs)
    return lambda: contender(next(turn))


def error(name: str, x: Inputs) -> dict[str, float]:
    """Relative errors of a contender's outputs, and what is allowed."""
    exact, out = x.exact(CHECKED_ROWS), CONTENDERS[name](x)
    if name == "scaled_mm tensor":
        scale = x.sa[0].double() * x.sb[0].double()
        exact = (x.a[:CHECKED_ROWS].double() @ x.b.double()) * scale
    elif name == "coda bias":
        exact = exact + x.bias.double()
    if name == "coda e4m3":
        largest = exact.abs().amax(1)
        exact = exact * x.scale
        limit = 2 * relative(exact.clamp(-448, 448).to(torch.float8_e4m3fn), exact)
        amax = relative(out.amax[:CHECKED_ROWS], largest)
        return {"error": relative(out.y[:CHECKED_ROWS], exact), "limit": limit, "amax": amax}
    found = {"error": relative(out[:CHECKED_ROWS], exact)}
    if name == "coda" and runs_here(by_row, x):
        found["limit"] = 2 * relative(by_row(x)[:CHECKED_ROWS], exact)
    elif name.startswith("coda"):
        found["limit"] = 4 * relative(exact.bfloat16(), exact)
    return found


def runs_here(contender: Callable[[Inputs], Any], x: Inputs) -> bool:
    """Whether this PyTorch has the contender; on CPUs some lack scales by row."""
    try:
        contender(x)
    except RuntimeError:
        return False
    return True


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())
