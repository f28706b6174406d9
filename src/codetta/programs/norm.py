"""Normalization split over two GEMMs.

A norm needs a number per row that is known only when the whole row is, but that number is a *row
scale*, and a row scale commutes with the next product: (r ⊙ x) Wᵀ = r ⊙ (x Wᵀ). So a norm is never
a kernel. The GEMM that produces x also sums what the norm needs, and the GEMM that consumes x
multiplies its result by r:

    producer   x = a b + residual, stored once; r = rsqrt(mean x² + eps) from one partial per tile
    consumer   z = r ⊙ (x (W ⊙ γ)ᵀ)

The sum is over x *as stored*: PyTorch normalizes the rounded x, and the backward reads it.

LayerNorm commutes too, with a rank-1 correction. With W' = W ⊙ γ, s = W' 1 and t = W β + b:

    ((x − μ) ⊙ r ⊙ γ + β) Wᵀ + b = r ⊙ (x W'ᵀ − μ ⊙ s) + t

Two things keep it accurate where |μ| is far above σ. Mean and variance come from one (count, mean,
M2) per tile, combined after Chan, because sums of x and x² cancel. And s is summed from W' as it
was rounded and stored, so that the error of the fold is the same in both terms and cancels.
"""

# Operand kinds are objects, not types, to a type checker.
# mypy: disable-error-code="valid-type, no-untyped-def, operator, arg-type"
from __future__ import annotations

from functools import cache

from codetta.language import (
    Col,
    Program,
    Row,
    Scalar,
    Tile,
    columns,
    epilogue,
    finalizer,
    gelu,
    moments,
    round_to,
    rowmean,
    rowsum,
    rsqrt,
)
from codetta.language.values import Value


# ------------------------------------------------------------------------------ producers
@epilogue
def residual_ssq(acc, residual: Tile):
    x = round_to(acc + residual)
    return {"x": x, "ssq": rowsum(x * x)}


@cache
def residual_rms(eps: float = 1e-6) -> Program:
    """Residual stream and the row scale of the RMSNorm (arXiv 1910.07467) that follows."""

    @epilogue
    def residual_rms(acc, residual: Tile):
        x = round_to(acc + residual)
        return {"x": x, "r": rsqrt(rowsum(x * x) / columns(x) + eps)}

    return residual_rms


@cache
def layernorm_statistics(eps: float = 1e-5) -> Program:
    """Residual stream, mean and row scale of the LayerNorm (arXiv 1607.06450) that follows."""

    @epilogue
    def layernorm_statistics(acc, residual: Tile):
        x = round_to(acc + residual)
        mean, variance = moments(x)
        return {"x": x, "mean": mean, "r": rsqrt(variance + eps)}

    return layernorm_statistics


# ------------------------------------------------- the same statistics where no GEMM makes x
@cache
def row_rms(eps: float = 1e-6) -> Program:
    """Row scale of an RMSNorm of a tensor no GEMM made, such as embeddings."""

    @finalizer
    def row_rms(x: Tile):
        return {"r": rsqrt(rowmean(x * x) + eps)}

    return row_rms


@cache
def row_layernorm(eps: float = 1e-5) -> Program:
    """Mean and row scale of a LayerNorm of a tensor no GEMM made."""

    @finalizer
    def row_layernorm(x: Tile):
        mean, variance = moments(x)
        return {"mean": mean, "r": rsqrt(variance + eps)}

    return row_layernorm


@cache
def rms_scale(eps: float = 1e-6) -> Program:
    """The finalizer of residual_ssq's sum, where several sums are added before it."""

    @finalizer
    def rms_scale(ssq: Col, dim: Scalar):
        return {"r": rsqrt(ssq / dim + eps)}

    return rms_scale


# ------------------------------------------------------------------------------ consumers
@epilogue
def row_scale(acc, r: Col):
    return acc * r


@epilogue
def row_scale_bias(acc, r: Col, bias: Row):
    return acc * r + bias


def normalized(acc: Value, r: Value, mean: Value, s: Value, t: Value) -> Value:
    """Preactivation of the Linear that follows a LayerNorm; see the module's docstring."""
    return r * (acc - mean * s) + t


@epilogue
def layernorm_apply(acc, r: Col, mean: Col, s: Row, t: Row):
    return normalized(acc, r, mean, s, t)


@cache
def layernorm_apply_gelu(approximate: str = "tanh") -> Program:
    """LayerNorm, Linear and GELU; the preactivation z is stored for the backward."""

    @epilogue
    def layernorm_apply_gelu(acc, r: Col, mean: Col, s: Row, t: Row):
        z = round_to(normalized(acc, r, mean, s, t))
        return {"z": z, "y": gelu(z, approximate)}

    return layernorm_apply_gelu
