"""Gated activations: two projections as one GEMM, and their product in its epilogue.

The weights of gate and up are packed row by row, [g0, u0, g1, u1, ...], so that one GEMM gives the
pairs (g, u) in adjacent columns. Both members of a pair are then in the same registers, and the
gated result, half as wide as the accumulator, needs no exchange:

    y = silu(g) u    SwiGLU        y = gelu(g) u    GEGLU        (Shazeer, arXiv 2002.05202)

After an RMSNorm the accumulator is first scaled by the row's r (see norm.py). What the backward
needs is the pair, not y: u cannot be had back from y and g where silu(g) is small. So the scaled
form stores z = (g, u) next to y; the plain forms leave it to the derivative to ask for it.
"""

# Operand kinds are objects, not types, to a type checker.
# mypy: disable-error-code="valid-type, no-untyped-def, operator, arg-type"
from __future__ import annotations

from functools import cache

from codetta.language import Col, Program, epilogue, gelu, pack, silu, unpack


@epilogue
def swiglu(acc):
    g, u = unpack(acc)
    return silu(g) * u


@epilogue
def row_scale_swiglu(acc, r: Col):
    g, u = unpack(acc * r)
    return {"z": pack(g, u), "y": silu(g) * u}


@cache
def geglu(approximate: str = "tanh") -> Program:
    """GEGLU of adjacent pairs, with the exact ('none') or the 'tanh' GELU."""

    @epilogue
    def geglu(acc):
        g, u = unpack(acc)
        return gelu(g, approximate) * u

    return geglu


@cache
def row_scale_geglu(approximate: str = "tanh") -> Program:
    """GEGLU behind an RMSNorm; stores the scaled pairs z like row_scale_swiglu."""

    @epilogue
    def row_scale_geglu(acc, r: Col):
        g, u = unpack(acc * r)
        return {"z": pack(g, u), "y": gelu(g, approximate) * u}

    return row_scale_geglu
