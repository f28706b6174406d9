"""fp8 products: scales that were divided out before the product are multiplied back behind it.

A matrix is quantized by dividing each row (or all of it) by a scale that brings its largest
magnitude near the largest fp8 number, 448 for e4m3 and 57344 for e5m2. A scale that is constant
along K commutes with the product, so the two sides meet in the epilogue:

    a ≈ sa ⊙ a8,  b ≈ sb ⊙ b8:    a b ≈ sa ⊙ (a8 b8) ⊙ sb,    sa (M,), sb (N,) fp32

e4m3 (3 bits of fraction) is for weights and activations, e5m2 (2 bits, a wider range) for gradients
(Micikevicius et al., arXiv 2209.05433). What the next product reads in fp8 is quantized here, by a
scale known beforehand, and the largest magnitude per row goes with it, for the next scale.

These are kernels, not a training recipe: they have no backward. An fp8 store saturates.
"""

# Operand kinds are objects, not types, to a type checker.
# mypy: disable-error-code="valid-type, no-untyped-def, operator, arg-type"
from __future__ import annotations

from functools import cache

from codetta.language import Col, Program, Row, Scalar, abs, epilogue, rowmax, store


@epilogue
def fp8_scaled(acc, sa: Col, sb: Row):
    return acc * sa * sb


@epilogue
def fp8_scaled_bias(acc, sa: Col, sb: Row, bias: Row):
    return acc * sa * sb + bias


@cache
def fp8_quantized(dtype: str = "e4m3") -> Program:
    """A scaled product stored in fp8, and the largest magnitude of each row before ``scale``.

    ``amax`` is final, (M,); with ``raw=True`` it is one maximum per row and tile, (M, T), of which
    one over blocks of rows is that of whole tiles.
    """

    @epilogue
    def fp8_quantized(acc, sa: Col, sb: Row, scale: Scalar):
        z = acc * sa * sb
        return {"y": store(z * scale, dtype), "amax": rowmax(abs(z))}

    return fp8_quantized
