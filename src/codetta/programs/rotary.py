"""Rotary position embedding in the epilogue of the q, k, v projection.

q, k and v come from one GEMM, [q heads | k heads | v heads], and the tile that holds a head holds
all its pairs. For each pair (a, b) of the first ``rotary_dim`` columns of the first ``heads``
heads, at the position of its row,

    (a, b)  ->  (a cos − b sin, a sin + b cos)          (Su et al., arXiv 2104.09864)

``heads`` counts q and k heads, so V passes bit for bit, and so does the tail of a partial rotary.
Pairs are 'adjacent' (2j, 2j + 1) or 'halves' (j, j + rotary_dim / 2) as in Hugging Face models.
Adjacent pairs lie in one thread's registers. Halves become adjacent by permuting the rows of Wq and
Wk alike: scores q kᵀ do not notice a permutation within heads.

Some models normalize every q and k head first. That statistic lives inside one head, hence inside
one tile, so it needs no second kernel: z ρ ⊙ w with ρ = rsqrt(mean over the head of z² + eps).
The operand ``normed`` says per head whether it is normalized (1) or passes (0, the V heads), and
``weight`` holds the norms' weights by column, 1 for V.

The rotation is orthogonal, so ⟨dz, z⟩ = ⟨dq, q⟩: the sum that the RMSNorm before this projection
needs in its backward is taken from q and dq, and z itself is not stored. With a bias it is
⟨dq, q⟩ − ⟨dz, b⟩. The exception is per-head norm, whose backward needs z: ``keep_z``.
"""

# Operand kinds are objects, not types, to a type checker.
# mypy: disable-error-code="valid-type, no-untyped-def, operator, arg-type"
from __future__ import annotations

from fractions import Fraction
from functools import cache

from codetta.language import (
    Col,
    Program,
    Rotary,
    Row,
    Tile,
    colsum,
    epilogue,
    finalizer,
    group_mean,
    rotate,
    round_to,
    rowsum,
    rsqrt,
    ungroup,
    where,
)
from codetta.language.values import Value


@cache
def row_scale_rotary(
    head_dim: int,
    rotary_dim: int | None = None,
    heads: int = -1,
    pairs: str = "adjacent",
    bias: bool = False,
) -> Program:
    """Rotated q, k, v of a projection behind an RMSNorm, with a bias if ``bias``."""

    def turned(z: Value, rope: Value) -> Value:
        return rotate(z, rope, head_dim=head_dim, rotary_dim=rotary_dim, heads=heads, pairs=pairs)

    if bias:

        @epilogue
        def row_scale_bias_rotary(acc, r: Col, bias: Row, rope: Rotary):
            return turned(acc * r + bias, rope)

        return row_scale_bias_rotary

    @epilogue
    def row_scale_rotary(acc, r: Col, rope: Rotary):
        return turned(acc * r, rope)

    return row_scale_rotary


@cache
def qk_norm_rotary(
    head_dim: int,
    eps: float = 1e-6,
    rotary_dim: int | None = None,
    heads: int = -1,
    pairs: str = "adjacent",
    keep_z: bool = False,
) -> Program:
    """RMSNorm of each q and k head, then rotation, behind an RMSNorm.

    With ``keep_z`` the preactivation z is stored too, rounded, and the norm sees it rounded.
    """
    per_head = Row(width=Fraction(1, head_dim))

    @epilogue
    def qk_norm_rotary(acc, r: Col, weight: Row, normed: per_head, rope: Rotary):
        z = acc * r
        if keep_z:
            z = round_to(z)
        rho = where(normed > 0.5, rsqrt(group_mean(z * z, head_dim) + eps), 1.0)
        q = rotate(
            z * ungroup(rho, head_dim) * weight, rope,
            head_dim=head_dim, rotary_dim=rotary_dim, heads=heads, pairs=pairs,
        )  # fmt: skip
        return {"z": z, "qkv": q} if keep_z else {"qkv": q}

    return qk_norm_rotary


# ------------------------------------------------------------------------------- backward
@cache
def rotary_backward(
    head_dim: int,
    rotary_dim: int | None = None,
    heads: int = -1,
    pairs: str = "adjacent",
    bias: bool = False,
) -> Program:
    """From dq, dk, dv as attention leaves them: r ⊙ dz, ⟨dz, z⟩ and, with a bias, its gradient."""

    def turned_back(q: Value, rope: Value) -> Value:
        return rotate(
            q, rope, head_dim=head_dim, rotary_dim=rotary_dim, heads=heads, pairs=pairs,
            inverse=True,
        )  # fmt: skip

    if bias:

        @finalizer
        def bias_rotary_backward(dqkv: Tile, qkv: Tile, r: Col, bias: Row, rope: Rotary):
            dh = turned_back(dqkv, rope)
            zdz = rowsum(dqkv * qkv - dh * bias)
            return {"dz": r * dh, "zdz": zdz, "dbias": colsum(dh)}

        return bias_rotary_backward

    @finalizer
    def rotary_backward(dqkv: Tile, qkv: Tile, r: Col, rope: Rotary):
        return {"dz": r * turned_back(dqkv, rope), "zdz": rowsum(dqkv * qkv)}

    return rotary_backward


@cache
def qk_norm_rotary_backward(
    head_dim: int,
    eps: float = 1e-6,
    rotary_dim: int | None = None,
    heads: int = -1,
    pairs: str = "adjacent",
) -> Program:
    """As rotary_backward, through the norm of each q and k head, from the stored z."""
    per_head = Row(width=Fraction(1, head_dim))

    @finalizer
    def qk_norm_rotary_backward(
        dqkv: Tile, z: Tile, r: Col, weight: Row, normed: per_head, rope: Rotary
    ):
        dn = rotate(
            dqkv, rope, head_dim=head_dim, rotary_dim=rotary_dim, heads=heads, pairs=pairs,
            inverse=True,
        )  # fmt: skip
        inverse = rsqrt(group_mean(z * z, head_dim) + eps)
        rho = ungroup(where(normed > 0.5, inverse, 1.0), head_dim)
        dg = dn * weight
        # The norm's correction, absent where a head passes.
        along = group_mean(dg * z, head_dim) * (inverse * inverse * inverse)
        dz = dg * rho - z * ungroup(where(normed > 0.5, along, 0.0), head_dim)
        return {"dz": r * dz, "zdz": rowsum(dz * z), "dweight": colsum(dn * (z * rho))}

    return qk_norm_rotary_backward
