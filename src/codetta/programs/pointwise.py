"""Epilogues that touch each element of the tile by itself: residual, bias, activation, softcap.

Each reads the accumulator in fp32, does all its arithmetic there and rounds once, at the store. A
bias added this way is never rounded between the product and the activation, unlike in eager mode.
"""

# Operand kinds are objects, not types, to a type checker.
# mypy: disable-error-code="valid-type, no-untyped-def, operator, arg-type"
from __future__ import annotations

from functools import cache

from codetta.language import Program, Row, Tile, epilogue, gelu, relu, square
from codetta.language import softcap as soft_capped


@epilogue
def identity(acc):
    return acc


@epilogue
def residual(acc, residual: Tile):
    return acc + residual


@epilogue
def bias(acc, bias: Row):
    return acc + bias


@epilogue
def bias_residual(acc, bias: Row, residual: Tile):
    return acc + bias + residual


@cache
def bias_gelu(approximate: str = "none") -> Program:
    """GELU behind a biased Linear, exact ('none') or by 'tanh'."""

    @epilogue
    def bias_gelu(acc, bias: Row):
        return gelu(acc + bias, approximate)

    return bias_gelu


@epilogue
def relu_squared(acc):
    return square(relu(acc))


@cache
def softcap(cap: float = 30.0) -> Program:
    """Logits bounded to (−cap, cap)."""

    @epilogue
    def softcap(acc):
        return soft_capped(acc, cap)

    return softcap
