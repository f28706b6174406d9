"""The paper form's epilogues in plain PyTorch: what QuACK's library computes, for tests."""

import torch
import torch.nn.functional as F
from paper_form import Kernels


def rms_partial(a, b, c, *, weight):
    h = a @ b + c
    return {"D": h * weight, "resid_out": h, "sqsum": (h * h).sum(1)}


def swiglu(a, b, *, rstd):
    acc = a @ b
    z = acc * rstd.t()
    return {"D": acc, "postact": F.silu(z[:, 0::2]) * z[:, 1::2]}


def rope(a, b, *, rstd, pos, freq):
    z = (a @ b) * rstd.t()
    angle = pos.t() * freq[:, 0::2]
    x, y = z[:, 0::2], z[:, 1::2]
    pairs = (x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos())
    return {"D": torch.stack(pairs, -1).flatten(1)}


def rms_bwd(a, b, c, *, y, w, corr):
    acc = a @ b
    return {"D": acc * w + c + y * corr.t(), "dw": (acc * y).sum(0)}


def rms_bwd_store(a, b, c, *, y, w, corr):
    return rms_bwd(a, b, c, y=y, w=w, corr=corr) | {"a": y * w}


def dswiglu(a, b, c, *, rstd):
    acc, r = a @ b, rstd.t()
    g, u = c[:, 0::2] * r, c[:, 1::2] * r
    s = torch.sigmoid(g)
    dg, du = acc * u * s * (1 + g * (1 - s)), acc * F.silu(g)
    d = torch.stack((dg, du), -1).flatten(1)
    return {"D": d * r, "postact": F.silu(g) * u, "dsum": (d * c).sum(1)}


def inv_freq(values, rotated, rest):
    """One frequency per column, zero where nothing is rotated."""
    head = values.repeat_interleave(2)
    return F.pad(head.repeat(rotated // len(head)), (0, rest)).to(torch.float32)


KERNELS = Kernels(rms_partial, swiglu, rope, rms_bwd, rms_bwd_store, dswiglu, inv_freq, lambda f: f)
