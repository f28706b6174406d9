"""Backward passes of the norm links and of the activations between them.

Every program has a derived backward (:mod:`codetta.language.vjp`). The programs here are kept by
hand because they use an identity that is not local to one program: a norm's backward needs a row
sum over dh, which the next dgrad only begins to make, and the adjoint

    rowsum((dz W) ⊙ h) = rowsum(dz ⊙ (h Wᵀ)) = ⟨dz, z⟩

lets whoever makes dz take that sum one GEMM earlier. All of them are tested against autograd.

RMSNorm link, z = r ⊙ (x (W ⊙ γ)ᵀ) with x (M, D), W (N, D). dz' = r ⊙ dz is what is stored:

    c  = r² ⟨dz, z⟩ / D                      rms_link_coefficient, M numbers
    dx = (dz' W) ⊙ γ + dres − c ⊙ x          rms_link_dgrad; the saved x is read, nothing recomputed
    dW = (dz'ᵀ x) ⊙ γ                        rms_link_wgrad, whose epilogue also gives
    dγ = colsum(W ⊙ (dz'ᵀ x))                from a tile of the weight's size, not of M × D

z is the value before any bias. If the stored value is h = z + b, then ⟨dz, z⟩ is ⟨dz, h − b⟩, and
db is summed from dz, before r. With W ⊙ γ already folded the dgrad needs no γ (``_folded``). With W
frozen there is no wgrad, and dγ = colsum((dz' W) ⊙ x) comes from the dgrad (``_frozen``). In fp16
r ⊙ dz can flush to zero where r is small: then dz is stored as it is and r is applied to the
accumulator (``_unscaled``), while the wgrad is given the normalized r ⊙ x as its second factor.

LayerNorm link, z = r ⊙ (x W'ᵀ − μ ⊙ s) + t, W' = W ⊙ γ, s = W' 1, t = W β + b (see norm.py). With
g = dz W', mean(g) = ⟨dz, s⟩ / D and mean(g ⊙ x̂) = ⟨dz, z − t⟩ / D, both known where dz is made:

    dx = (dz' W) ⊙ γ + dres − r mean(g) − r² mean(g ⊙ x̂) ⊙ (x − μ)
    P  = dz'ᵀ x − v 1ᵀ, v = dz'ᵀ μ           the weight gradient of x̂, from that of x
    dW = P ⊙ γ + db βᵀ,  dγ = colsum(W ⊙ P),  dβ = colsum(db ⊙ W)
"""

# Operand kinds are objects, not types, to a type checker.
# mypy: disable-error-code="valid-type, no-untyped-def, operator, arg-type"
from __future__ import annotations

import math
from functools import cache

from codetta.errors import BadAttribute
from codetta.language import (
    Col,
    Program,
    Row,
    Scalar,
    Tile,
    colsum,
    epilogue,
    erf,
    exp,
    finalizer,
    gelu,
    pack,
    rowsum,
    sigmoid,
    silu,
    tanh,
    unpack,
)
from codetta.language.values import Value


# --------------------------------------------------------------------------- RMSNorm link
@finalizer
def rms_link_coefficient(r: Col, zdz: Col, dim: Scalar):
    return {"c": r * r * zdz / dim}


@epilogue
def rms_link_dgrad(acc, gamma: Row, dres: Tile, x: Tile, c: Col):
    return {"dx": acc * gamma + dres - x * c}


@epilogue
def rms_link_dgrad_last(acc, gamma: Row, x: Tile, c: Col):
    return {"dx": acc * gamma - x * c}


@epilogue
def rms_link_dgrad_folded(acc, dres: Tile, x: Tile, c: Col):
    return {"dx": acc + dres - x * c}


@epilogue
def rms_link_dgrad_frozen(acc, gamma: Row, dres: Tile, x: Tile, c: Col):
    return {"dx": acc * gamma + dres - x * c, "dgamma": colsum(acc * x)}


@epilogue
def rms_link_dgrad_unscaled(acc, r: Col, gamma: Row, dres: Tile, x: Tile, c: Col):
    return {"dx": acc * r * gamma + dres - x * c}


@epilogue
def rms_link_wgrad(acc, gamma: Row, w: Tile):
    return {"dw": acc * gamma, "dgamma": colsum(acc * w)}


# ------------------------------------------------------------------- gated, behind a norm
def _swiglu_slopes(dy: Value, g: Value, u: Value) -> tuple[Value, Value]:
    """dg and du of y = silu(g) u."""
    s = sigmoid(g)
    return dy * u * (s * (1.0 + g * (1.0 - s))), dy * silu(g)


@epilogue
def swiglu_backward(acc, z: Tile(width=2), r: Col):
    g, u = unpack(z)
    dg, du = _swiglu_slopes(acc, g, u)
    return {"dz": pack(r * dg, r * du), "y": silu(g) * u, "zdz": rowsum(g * dg + u * du)}


@epilogue
def swiglu_backward_unscaled(acc, z: Tile(width=2)):
    g, u = unpack(z)
    dg, du = _swiglu_slopes(acc, g, u)
    return {"dz": pack(dg, du), "y": silu(g) * u, "zdz": rowsum(g * dg + u * du)}


@cache
def geglu_backward(approximate: str = "tanh") -> Program:
    """As swiglu_backward, for row_scale_geglu."""

    @epilogue
    def geglu_backward(acc, z: Tile(width=2), r: Col):
        g, u = unpack(z)
        active = gelu(g, approximate)
        dg, du = acc * u * gelu_slope(g, approximate), acc * active
        return {"dz": pack(r * dg, r * du), "y": active * u, "zdz": rowsum(g * dg + u * du)}

    return geglu_backward


def gelu_slope(z: Value, approximate: str) -> Value:
    """Derivative of gelu(z, approximate): Φ(z) + z φ(z), or that of the tanh form."""
    if approximate == "none":
        density = exp(-0.5 * (z * z)) * (1.0 / math.sqrt(2.0 * math.pi))
        return 0.5 * (1.0 + erf(z * math.sqrt(0.5))) + z * density
    if approximate != "tanh":
        raise BadAttribute(
            op="gelu", attribute="approximate", given=approximate, fix="use 'none' (erf) or 'tanh'"
        )
    scale, cubic = math.sqrt(2.0 / math.pi), 0.044715
    t = tanh(scale * (z + cubic * (z * z * z)))
    return 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * (scale * (1.0 + 3.0 * cubic * (z * z)))


# -------------------------------------------------------------------------------- biases
@finalizer
def row_scale_bias_backward(dh: Tile, h: Tile, r: Col, bias: Row):
    return {"dz": r * dh, "dbias": colsum(dh), "zdz": rowsum((h - bias) * dh)}


@cache
def bias_gelu_backward(approximate: str = "none") -> Program:
    """From dy and the preactivation h = a bᵀ + bias: dh, its column sum, and y again."""

    @epilogue
    def bias_gelu_backward(acc, h: Tile):
        dh = acc * gelu_slope(h, approximate)
        return {"dh": dh, "y": gelu(h, approximate), "dbias": colsum(dh)}

    return bias_gelu_backward


# ------------------------------------------------------------------------- LayerNorm link
def _layernorm_sums(
    dz: Value, z: Value, r: Value, mean: Value, s: Value, t: Value
) -> dict[str, Value]:
    """r ⊙ dz and every sum over dz that the link's dgrad and wgrad need."""
    scaled = r * dz
    return {
        "dz": scaled,
        "sdz": rowsum(dz * s),
        "zdz": rowsum(dz * (z - t)),
        "db": colsum(dz),
        "v": colsum(mean * scaled),
    }


@finalizer
def layernorm_apply_backward(dz: Tile, z: Tile, r: Col, mean: Col, s: Row, t: Row):
    return _layernorm_sums(dz, z, r, mean, s, t)


@cache
def layernorm_gelu_backward(approximate: str = "tanh") -> Program:
    """As layernorm_apply_backward, from dy of the GELU behind it; y is recomputed."""

    @epilogue
    def layernorm_gelu_backward(acc, z: Tile, r: Col, mean: Col, s: Row, t: Row):
        dz = acc * gelu_slope(z, approximate)
        return _layernorm_sums(dz, z, r, mean, s, t) | {"y": gelu(z, approximate)}

    return layernorm_gelu_backward


@finalizer
def layernorm_link_coefficients(r: Col, sdz: Col, zdz: Col, dim: Scalar):
    return {"c0": r * sdz / dim, "c1": r * r * zdz / dim}


@epilogue
def layernorm_link_dgrad(acc, gamma: Row, dres: Tile, x: Tile, mean: Col, c0: Col, c1: Col):
    return {"dx": acc * gamma + dres - c0 - (x - mean) * c1}


@epilogue
def layernorm_link_wgrad(acc, gamma: Row, beta: Row, w: Tile, v: Col, db: Col):
    p = acc - v
    return {"dw": p * gamma + db * beta, "dgamma": colsum(p * w), "dbeta": colsum(db * w)}
