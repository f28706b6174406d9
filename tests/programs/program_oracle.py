"""Plain PyTorch formulas of the ready programs, and inputs for them.

The formulas are written against tensors of natural shape (tiles (M, N), rows (N,), columns (M,))
and know nothing of the language, so that they can judge it. They compute in the dtype they get.
"""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from codetta.backends.reference import execute
from codetta.language import Program
from codetta.language.meaning import Context
from codetta.language.types import Kind

HEAD, HEADS = 4, 3  # head_dim and rotated heads of the catalog's examples
COMPUTE = {torch.float64: torch.float64}


def run(program: Program, acc: Tensor | None, tile=(3, 8), dtype=None, shape=None, **operands):
    """Outputs by name, from natural shapes; `dtype` is that of a, by default the accumulator's."""
    m, n = acc.shape if acc is not None else shape
    dtype = dtype or acc.dtype
    context = Context(m, n, dtype, COMPUTE.get(dtype, torch.float32), torch.device("cpu"))
    flat = {
        o.name: two_dimensional(operands[o.name], o.kind, context.compute) for o in program.operands
    }
    results, _ = execute(program, context, flat, acc=acc, tile=tile)
    return SimpleNamespace(**results)


def two_dimensional(x, kind: Kind, dtype: torch.dtype) -> Tensor:
    if kind is Kind.ROTARY:
        return torch.cat(x, dim=1)
    if kind in (Kind.COL, Kind.INDEX):
        return x[:, None]
    if kind is Kind.ROW:
        return x[None, :]
    return torch.as_tensor(x, dtype=dtype).reshape(1, 1) if kind is Kind.SCALAR else x


def inputs(program: Program, m: int, n: int, dtype: torch.dtype):
    """A random accumulator, None where the program has none, and operands."""
    generator = torch.Generator().manual_seed(zlib.crc32(program.name.encode()) + m * 1000 + n)
    wide = COMPUTE.get(dtype, torch.float32)

    def normal(*shape, dtype=wide):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def operand(o):
        width = int(o.width * n)
        if o.name == "normed":
            return (torch.arange(width) < HEADS - 1).to(wide)
        if o.name in ("r", "ssq"):
            return normal(m).abs() + 0.1
        if o.kind is Kind.TILE:
            return normal(m, width, dtype=dtype)
        if o.kind is Kind.INDEX:
            target = torch.randint(0, n, (m,), generator=generator)
            return torch.where(torch.arange(m) % 3 == 2, -100, target)
        if o.kind is Kind.ROTARY:
            angle = normal(m, HEAD // 2)
            return angle.cos(), angle.sin()
        if o.kind is Kind.SCALAR:
            return torch.tensor(float(n), dtype=wide)
        return normal(m) if o.kind is Kind.COL else normal(width)

    acc = normal(m, n) if program.has_acc else None
    return acc, {o.name: operand(o) for o in program.operands}


# --------------------------------------------------------------------------------- pieces
def col(x: Tensor) -> Tensor:
    return x[:, None]


def pairs_of(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, 0::2], x[:, 1::2]


def paired(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack((a, b), dim=-1).flatten(1)


def rotated(x: Tensor, rope, heads: int = HEADS, inverse: bool = False) -> Tensor:
    """Adjacent pairs of the first heads, as complex numbers."""
    cos, sin = rope
    turn = torch.complex(cos.double(), -sin.double() if inverse else sin.double())[:, None, :]
    m, n = x.shape
    x = x.reshape(m, n // HEAD, HEAD)
    z = torch.view_as_complex(x[:, :heads].double().reshape(m, heads, HEAD // 2, 2))
    out = torch.view_as_real(z * turn).reshape(m, heads, HEAD).to(x.dtype)
    return torch.cat((out, x[:, heads:]), dim=1).reshape(m, n)


def head_normed(z: Tensor, weight: Tensor, normed: Tensor) -> Tensor:
    heads = z.reshape(z.shape[0], z.shape[1] // HEAD, HEAD)
    scaled = F.rms_norm(heads, (HEAD,), eps=1e-6)
    return torch.where(normed[None, :, None] > 0, scaled, heads).reshape(z.shape) * weight


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def slope(function, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x).sum(), x)[0]


def gated_backward(act, dy: Tensor, z: Tensor, r: Tensor | None):
    g, u = pairs_of(z)
    dg, du = dy * u * slope(act, g), dy * act(g)
    dz = paired(dg, du)
    scaled = dz if r is None else dz * col(r)
    return {"dz": scaled, "y": act(g) * u, "zdz": (z * dz).sum(1)}


def softmax_sums(z: Tensor, target: Tensor):
    p = z.softmax(1)
    logit = torch.where(target >= 0, z.gather(1, col(target.clamp(min=0)))[:, 0], 0.0)
    return {"lse": z.logsumexp(1), "logit": logit, "expected": (p * z).sum(1)}


def layernorm_sums(dz, z, r, mean, s, t):
    return {
        "dz": col(r) * dz, "sdz": dz @ s, "zdz": (dz * (z - t)).sum(1),
        "db": dz.sum(0), "v": (dz * col(r * mean)).sum(0),
    }  # fmt: skip


def per_head_backward(dqkv, z, r, weight, normed, rope):
    with torch.enable_grad():
        z, w = z.detach().requires_grad_(), weight.detach().requires_grad_()
        q = rotated(head_normed(z, w, normed), rope)
        dz, dweight = torch.autograd.grad(q, (z, w), dqkv)
    return {"dz": col(r) * dz, "zdz": (dz * z).sum(1), "dweight": dweight}


def target_minus(acc, target):
    inside = (target >= 0).to(acc.dtype)
    return F.one_hot(target.clamp(min=0), acc.shape[1]).to(acc.dtype) * col(inside)


def fp8(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def layernorm_z(acc, r, mean, s, t):
    return col(r) * acc - col(r * mean) * s + t


def moments(x, eps):
    return {"mean": x.mean(1), "r": 1 / ((x - col(x.mean(1))).pow(2).mean(1) + eps).sqrt()}


# ------------------------------------------------------------------------------- formulas
ORACLES = {
    "identity": lambda acc: {"result": acc},
    "residual": lambda acc, residual: {"result": acc + residual},
    "bias": lambda acc, bias: {"result": acc + bias},
    "bias_residual": lambda acc, bias, residual: {"result": acc + bias + residual},
    "bias_gelu": lambda acc, bias: {"result": gelu_tanh(acc + bias)},
    "relu_squared": lambda acc: {"result": acc.clamp(min=0) ** 2},
    "softcap": lambda acc: {"result": 30 * (acc / 30).tanh()},
    "residual_ssq": lambda acc, residual: {
        "x": acc + residual, "ssq": (acc + residual).pow(2).sum(1),
    },
    "residual_rms": lambda acc, residual: {
        "x": acc + residual, "r": 1 / ((acc + residual).pow(2).mean(1) + 1e-6).sqrt(),
    },
    "row_rms": lambda x: {"r": 1 / (x.pow(2).mean(1) + 1e-6).sqrt()},
    "rms_scale": lambda ssq, dim: {"r": 1 / (ssq / dim + 1e-6).sqrt()},
    "row_scale": lambda acc, r: {"result": acc * col(r)},
    "row_scale_bias": lambda acc, r, bias: {"result": acc * col(r) + bias},
    "layernorm_statistics": lambda acc, residual: {
        "x": acc + residual, **moments(acc + residual, 1e-5),
    },
    "row_layernorm": lambda x: moments(x, 1e-5),
    "layernorm_apply": lambda acc, **o: {"result": layernorm_z(acc, **o)},
    "layernorm_apply_gelu": lambda acc, **o: {
        "z": layernorm_z(acc, **o), "y": gelu_tanh(layernorm_z(acc, **o)),
    },
    "swiglu": lambda acc: {"result": F.silu(acc[:, 0::2]) * acc[:, 1::2]},
    "row_scale_swiglu": lambda acc, r: {
        "z": acc * col(r), "y": F.silu(acc[:, 0::2] * col(r)) * acc[:, 1::2] * col(r),
    },
    "geglu": lambda acc: {"result": gelu_tanh(acc[:, 0::2]) * acc[:, 1::2]},
    "row_scale_geglu": lambda acc, r: {
        "z": acc * col(r), "y": gelu_tanh(acc[:, 0::2] * col(r)) * acc[:, 1::2] * col(r),
    },
    "row_scale_rotary": lambda acc, r, rope: {"result": rotated(acc * col(r), rope)},
    "qk_norm_rotary": lambda acc, r, weight, normed, rope: {
        "z": acc * col(r), "qkv": rotated(head_normed(acc * col(r), weight, normed), rope),
    },
    "row_scale_lse_target": lambda acc, r, target: softmax_sums(acc * col(r), target),
    "fp8_scaled": lambda acc, sa, sb: {"result": acc * col(sa) * sb},
    "fp8_scaled_bias": lambda acc, sa, sb, bias: {"result": acc * col(sa) * sb + bias},
    "fp8_quantized": lambda acc, sa, sb, scale: {
        "y": fp8(acc * col(sa) * sb * scale), "amax": (acc * col(sa) * sb).abs().amax(1),
    },
    "cross_entropy_loss": lambda lse, logit: {"loss": lse - logit},
    "cross_entropy_coefficient": lambda r, grad, expected, logit, dim: {
        "c": r**2 * grad * (expected - logit) / dim,
    },
    "cross_entropy_backward": lambda acc, r, lse, target, grad: {
        "dz": ((acc * col(r) - col(lse)).exp() - target_minus(acc, target)) * col(grad * r),
    },
    "rms_link_coefficient": lambda r, zdz, dim: {"c": r**2 * zdz / dim},
    "rms_link_dgrad": lambda acc, gamma, dres, x, c: {"dx": acc * gamma + dres - x * col(c)},
    "rms_link_dgrad_last": lambda acc, gamma, x, c: {"dx": acc * gamma - x * col(c)},
    "rms_link_dgrad_folded": lambda acc, dres, x, c: {"dx": acc + dres - x * col(c)},
    "rms_link_dgrad_frozen": lambda acc, gamma, dres, x, c: {
        "dx": acc * gamma + dres - x * col(c), "dgamma": (acc * x).sum(0),
    },
    "rms_link_dgrad_unscaled": lambda acc, r, gamma, dres, x, c: {
        "dx": acc * col(r) * gamma + dres - x * col(c),
    },
    "rms_link_wgrad": lambda acc, gamma, w: {"dw": acc * gamma, "dgamma": (acc * w).sum(0)},
    "swiglu_backward": lambda acc, z, r: gated_backward(F.silu, acc, z, r),
    "swiglu_backward_unscaled": lambda acc, z: gated_backward(F.silu, acc, z, None),
    "geglu_backward": lambda acc, z, r: gated_backward(gelu_tanh, acc, z, r),
    "row_scale_bias_backward": lambda dh, h, r, bias: {
        "dz": dh * col(r), "dbias": dh.sum(0), "zdz": ((h - bias) * dh).sum(1),
    },
    "bias_gelu_backward": lambda acc, h: {
        "dh": acc * slope(gelu_tanh, h), "y": gelu_tanh(h),
        "dbias": (acc * slope(gelu_tanh, h)).sum(0),
    },
    "rotary_backward": lambda dqkv, qkv, r, rope: {
        "dz": rotated(dqkv, rope, inverse=True) * col(r), "zdz": (dqkv * qkv).sum(1),
    },
    "qk_norm_rotary_backward": per_head_backward,
    "layernorm_apply_backward": layernorm_sums,
    "layernorm_gelu_backward": lambda acc, z, **o: {
        **layernorm_sums(acc * slope(gelu_tanh, z), z, **o), "y": gelu_tanh(z),
    },
    "layernorm_link_coefficients": lambda r, sdz, zdz, dim: {
        "c0": r * sdz / dim, "c1": r**2 * zdz / dim,
    },
    "layernorm_link_dgrad": lambda acc, gamma, dres, x, mean, c0, c1: {
        "dx": acc * gamma + dres - col(c0) - (x - col(mean)) * col(c1),
    },
    "layernorm_link_wgrad": lambda acc, gamma, beta, w, v, db: {
        "dw": (acc - col(v)) * gamma + col(db) * beta,
        "dgamma": ((acc - col(v)) * w).sum(0), "dbeta": db @ w,
    },
}  # fmt: skip
