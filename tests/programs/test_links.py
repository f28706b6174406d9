"""Hand-written backward forms, chained as a decoder layer chains them, against autograd in fp64.

Each test writes the layer as PyTorch would and asks autograd for its gradients, then computes the
same gradients with products and the programs. Agreement is to rounding of fp64.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from program_oracle import HEAD, HEADS, head_normed, pairs_of, rotated, run

from codetta import programs
from codetta.language.vjp import vjp

torch.manual_seed(0)
M, D, N = 7, 12, 16
EPS = 1e-6


def normal(*shape, grad=False):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def close(ours, exact):
    scale = exact.abs().max()
    assert (ours - exact).abs().max() <= 1e-12 * scale, (ours - exact).abs().max() / scale


class Link:
    """x, γ and W of an RMSNorm and the Linear behind it, with gradients wanted for all three."""

    def __init__(self, columns=N):
        self.x, self.gamma, self.w = (
            normal(M, D, grad=True), normal(D, grad=True), normal(columns, D, grad=True),
        )  # fmt: skip
        self.dres = normal(M, D)

    def linear(self):
        return F.rms_norm(self.x, (D,), self.gamma, EPS) @ self.w.T

    @property
    def leaves(self):
        return self.x, self.gamma, self.w

    def exact(self, output, cotangent):
        """dx (with the residual's gradient), dγ, dW and more by autograd."""
        with torch.enable_grad():
            total = (output * cotangent).sum() + (self.x * self.dres).sum()
            return torch.autograd.grad(total, self.leaves)

    def r(self):
        return run(programs.row_rms(EPS), None, shape=(M, D), dtype=torch.float64, x=self.x).r

    @torch.no_grad()
    def z(self):
        folded = self.w * self.gamma
        return run(programs.row_scale, self.x @ folded.T, r=self.r()).result

    @torch.no_grad()
    def close(self, scaled_dz, zdz, output, cotangent):
        """All gradients from r ⊙ dz and ⟨dz, z⟩, by the plain form of the link."""
        dx, dgamma, dw = self.exact(output, cotangent)
        dgrad = run(
            programs.rms_link_dgrad, scaled_dz @ self.w,
            gamma=self.gamma, dres=self.dres, x=self.x, c=self.c(zdz),
        )  # fmt: skip
        wgrad = run(programs.rms_link_wgrad, scaled_dz.T @ self.x, gamma=self.gamma, w=self.w)
        close(dgrad.dx, dx)
        close(wgrad.dw, dw)
        close(wgrad.dgamma, dgamma)

    def c(self, zdz):
        return run(
            programs.rms_link_coefficient, None, shape=(M, 1), dtype=torch.float64,
            r=self.r(), zdz=zdz, dim=D,
        ).c  # fmt: skip


def silu_gate(z):
    g, u = pairs_of(z)
    return F.silu(g) * u


def gelu_gate(z):
    g, u = pairs_of(z)
    return F.gelu(g, approximate="tanh") * u


@pytest.mark.parametrize(
    ("gate", "backward"),
    [(silu_gate, programs.swiglu_backward), (gelu_gate, programs.geglu_backward("tanh"))],
    ids=["swiglu", "geglu"],
)
def test_rms_link_through_a_gate(gate, backward):
    link, down, dout = Link(), normal(5, N // 2), normal(M, 5)
    output = gate(link.linear()) @ down.T
    back = run(backward, dout @ down, z=link.z(), r=link.r())
    close(back.y, gate(link.linear()).detach())
    link.close(back.dz, back.zdz, output, dout)


def swiglu_step(link, dout, down, backward=programs.swiglu_backward, **operands):
    return run(backward, dout @ down, z=link.z(), **operands)


def test_rms_link_with_a_folded_weight():
    link, down, dout = Link(), normal(5, N // 2), normal(M, 5)
    dx, _, _ = link.exact(silu_gate(link.linear()) @ down.T, dout)
    back = swiglu_step(link, dout, down, r=link.r())
    acc = back.dz @ (link.w * link.gamma)
    ours = run(programs.rms_link_dgrad_folded, acc, dres=link.dres, x=link.x, c=link.c(back.zdz))
    close(ours.dx, dx)


def test_rms_link_with_a_frozen_weight_sums_dgamma_in_the_dgrad():
    link, down, dout = Link(), normal(5, N // 2), normal(M, 5)
    dx, dgamma, _ = link.exact(silu_gate(link.linear()) @ down.T, dout)
    back = swiglu_step(link, dout, down, r=link.r())
    ours = run(
        programs.rms_link_dgrad_frozen, back.dz @ link.w,
        gamma=link.gamma, dres=link.dres, x=link.x, c=link.c(back.zdz),
    )  # fmt: skip
    close(ours.dx, dx)
    close(ours.dgamma, dgamma)


def test_rms_link_with_r_kept_out_of_the_store():
    link, down, dout = Link(), normal(5, N // 2), normal(M, 5)
    dx, dgamma, dw = link.exact(silu_gate(link.linear()) @ down.T, dout)
    back = swiglu_step(link, dout, down, programs.swiglu_backward_unscaled)
    ours = run(
        programs.rms_link_dgrad_unscaled, back.dz @ link.w,
        r=link.r(), gamma=link.gamma, dres=link.dres, x=link.x, c=link.c(back.zdz),
    )  # fmt: skip
    normalized = link.x * link.r()[:, None]
    wgrad = run(programs.rms_link_wgrad, back.dz.T @ normalized, gamma=link.gamma, w=link.w)
    close(ours.dx, dx)
    close(wgrad.dw, dw)
    close(wgrad.dgamma, dgamma)


def test_rms_link_behind_a_bias_subtracts_it_from_the_stored_value():
    link, bias, dh = Link(), normal(N, grad=True), normal(M, N)
    output = link.linear() + bias
    (dbias,) = torch.autograd.grad((output * dh).sum(), bias, retain_graph=True)
    h = run(programs.row_scale_bias, link.x @ (link.w * link.gamma).T, r=link.r(), bias=bias)
    back = run(
        programs.row_scale_bias_backward, None, shape=(M, N), dtype=torch.float64,
        dh=dh, h=h.result, r=link.r(), bias=bias,
    )  # fmt: skip
    close(back.dbias, dbias)
    link.close(back.dz, back.zdz, output, dh)


def rope():
    angle = normal(M, HEAD // 2)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_rms_link_through_rotation_needs_no_z(bias):
    link, table, dqkv = Link(), rope(), normal(M, N)
    offset = normal(N, grad=True) if bias else torch.zeros(N, dtype=torch.float64)
    qkv = rotated(link.linear() + offset, table)
    extra = {"bias": offset} if bias else {}
    back = run(
        programs.rotary_backward(HEAD, heads=HEADS, bias=bias), None, shape=(M, N),
        dtype=torch.float64, dqkv=dqkv, qkv=qkv.detach(), r=link.r(), rope=table, **extra,
    )  # fmt: skip
    if bias:
        (dbias,) = torch.autograd.grad((qkv * dqkv).sum(), offset, retain_graph=True)
        close(back.dbias, dbias)
    link.close(back.dz, back.zdz, qkv, dqkv)


def test_rms_link_through_per_head_norm_and_rotation():
    link, table, dqkv = Link(), rope(), normal(M, N)
    normed = (torch.arange(N // HEAD) < HEADS).double()
    weight = torch.where(normed.repeat_interleave(HEAD) > 0, normal(N), 1.0).requires_grad_()
    qkv = rotated(head_normed(link.linear(), weight, normed), table)
    (dweight,) = torch.autograd.grad((qkv * dqkv).sum(), weight, retain_graph=True)
    back = run(
        programs.qk_norm_rotary_backward(HEAD, EPS, heads=HEADS), None, shape=(M, N),
        dtype=torch.float64, dqkv=dqkv, z=link.z(), r=link.r(), weight=weight, normed=normed,
        rope=table,
    )  # fmt: skip
    close(back.dweight, dweight)
    link.close(back.dz, back.zdz, qkv, dqkv)


def test_head_loss_and_the_norm_before_it():
    link, vocabulary = Link(23), 23
    target = torch.randint(0, vocabulary, (M,))
    target[2] = -100
    grad = torch.rand(M, dtype=torch.float64)
    grad[2] = 0.0
    losses = F.cross_entropy(link.linear(), target, reduction="none", ignore_index=-100)
    dx, dgamma, dw = torch.autograd.grad((losses * grad).sum(), link.leaves)
    r, c = link.r(), {"shape": (M, 1), "dtype": torch.float64}
    with torch.no_grad():
        logits = link.x @ (link.w * link.gamma).T
        head = run(programs.row_scale_lse_target, logits, r=r, target=target)
        ours = run(programs.cross_entropy_loss, None, **c, lse=head.lse, logit=head.logit).loss
        coefficient = run(
            programs.cross_entropy_coefficient, None, **c,
            r=r, grad=grad, expected=head.expected, logit=head.logit, dim=D,
        ).c  # fmt: skip
        dz = run(
            programs.cross_entropy_backward, logits, r=r, lse=head.lse, target=target, grad=grad
        ).dz
        dgrad = run(
            programs.rms_link_dgrad_last, dz @ link.w, gamma=link.gamma, x=link.x, c=coefficient
        )
        wgrad = run(programs.rms_link_wgrad, dz.T @ link.x, gamma=link.gamma, w=link.w)
    counted = grad > 0
    close(ours[counted], losses.detach()[counted])
    close(dgrad.dx, dx)
    close(wgrad.dw, dw)
    close(wgrad.dgamma, dgamma)


def test_layernorm_link():
    x, gamma, beta = normal(M, D, grad=True), normal(D, grad=True), normal(D, grad=True)
    w, b = normal(N, D, grad=True), normal(N, grad=True)
    down, dout, dres = normal(5, N), normal(M, 5), normal(M, D)
    z = F.linear(F.layer_norm(x, (D,), gamma, beta), w, b)
    total = (F.gelu(z, approximate="tanh") @ down.T * dout).sum() + (x * dres).sum()
    exact = torch.autograd.grad(total, (x, gamma, beta, w, b))
    with torch.no_grad():
        acc = x @ (w * gamma).T
        stats = run(programs.row_layernorm(1e-5), None, shape=(M, D), dtype=x.dtype, x=x)
        link = {"r": stats.r, "mean": stats.mean, "s": (w * gamma).sum(1), "t": w @ beta + b}
        forward = run(programs.layernorm_apply_gelu("tanh"), acc, **link)
        back = run(programs.layernorm_gelu_backward("tanh"), dout @ down, z=forward.z, **link)
        c = run(
            programs.layernorm_link_coefficients, None, shape=(M, 1), dtype=x.dtype,
            r=stats.r, sdz=back.sdz, zdz=back.zdz, dim=D,
        )  # fmt: skip
        dgrad = run(
            programs.layernorm_link_dgrad, back.dz @ w,
            gamma=gamma, dres=dres, x=x, mean=stats.mean, c0=c.c0, c1=c.c1,
        )  # fmt: skip
        wgrad = run(
            programs.layernorm_link_wgrad, back.dz.T @ x,
            gamma=gamma, beta=beta, w=w, v=back.v, db=back.db,
        )  # fmt: skip
    close(forward.z, z.detach())
    for ours, value in zip(
        (dgrad.dx, wgrad.dgamma, wgrad.dbeta, wgrad.dw, back.db), exact, strict=True
    ):
        close(ours, value)


# ------------------------------------------------ by hand against derived, program by program
@torch.no_grad()
def derived(program, acc, cotangents, tile=(3, 8), **operands):
    """d_acc and the operands' gradients by vjp, on the reference backend."""
    wrt = ["acc", *(o.name for o in program.operands if o.kind.value in ("Tile", "Row", "Col"))]
    backward = vjp(program, wrt)
    forward = vars(run(backward.forward, acc, tile=tile, **operands))
    known = dict(operands)
    known |= {f"saved_{k.removeprefix('saved_')}": v for k, v in forward.items()}
    known |= {f"d_{k}": v for k, v in cotangents.items()}
    for step in backward.passes:
        known |= vars(run(step, None, tile=tile, shape=acc.shape, dtype=acc.dtype, **known))
    return known


@pytest.mark.parametrize(
    ("forward", "by_hand"),
    [
        (programs.row_scale_swiglu, programs.swiglu_backward),
        (programs.row_scale_geglu("none"), programs.geglu_backward("none")),
        (programs.row_scale_geglu("tanh"), programs.geglu_backward("tanh")),
    ],
    ids=["swiglu", "geglu none", "geglu tanh"],
)
def test_gate_by_hand_equals_derived(forward, by_hand):
    acc, r, dy = normal(M, N), torch.rand(M, dtype=torch.float64) + 0.5, normal(M, N // 2)
    found = derived(forward, acc, {"z": torch.zeros(M, N).double(), "y": dy}, r=r)
    z = run(forward, acc, r=r).z
    ours = run(by_hand, dy, z=z, r=r)
    close(ours.dz, found["d_acc"])
    close(ours.zdz, r * found["d_r"])  # ⟨dz, z⟩ = r ⟨dz, acc⟩


def test_rotation_by_hand_equals_derived():
    acc, r, dq, table = normal(M, N), torch.rand(M, dtype=torch.float64) + 0.5, normal(M, N), rope()
    forward = programs.row_scale_rotary(HEAD, heads=HEADS)
    found = derived(forward, acc, {"result": dq}, r=r, rope=table)
    ours = run(
        programs.rotary_backward(HEAD, heads=HEADS), None, shape=(M, N), dtype=torch.float64,
        dqkv=dq, qkv=run(forward, acc, r=r, rope=table).result, r=r, rope=table,
    )  # fmt: skip
    close(ours.dz, found["d_acc"])
    close(ours.zdz, r * found["d_r"])


@pytest.mark.parametrize("rotary_dim", [None, 2])
@pytest.mark.parametrize("pairs", ["adjacent", "halves"])
def test_per_head_norm_by_hand_equals_derived(pairs, rotary_dim):
    acc, r, dq = normal(M, N), torch.rand(M, dtype=torch.float64) + 0.5, normal(M, N)
    angle = normal(M, (rotary_dim or HEAD) // 2)
    shared = {
        "r": r, "weight": normal(N), "normed": (torch.arange(N // HEAD) < HEADS).double(),
        "rope": (angle.cos(), angle.sin()),
    }  # fmt: skip
    form = {"rotary_dim": rotary_dim, "heads": HEADS, "pairs": pairs}
    forward = programs.qk_norm_rotary(HEAD, EPS, **form, keep_z=True)
    found = derived(forward, acc, {"z": torch.zeros(M, N).double(), "qkv": dq}, **shared)
    ours = run(
        programs.qk_norm_rotary_backward(HEAD, EPS, **form), None, shape=(M, N),
        dtype=torch.float64, dqkv=dq, z=run(forward, acc, **shared).z, **shared,
    )  # fmt: skip
    close(ours.dz, found["d_acc"])
    close(ours.dweight, found["d_weight"])


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_bias_gelu_by_hand_equals_derived(approximate):
    acc, bias, dy = normal(M, N), normal(N), normal(M, N)
    found = derived(programs.bias_gelu(approximate), acc, {"result": dy}, bias=bias)
    ours = run(programs.bias_gelu_backward(approximate), dy, h=acc + bias)
    close(ours.dh, found["d_acc"])
    close(ours.dbias, found["d_bias"])


def test_layernorm_apply_by_hand_equals_derived():
    acc, dz = normal(M, N), normal(M, N)
    link = {
        "r": torch.rand(M, dtype=torch.float64) + 0.5, "mean": normal(M), "s": normal(N),
        "t": normal(N),
    }  # fmt: skip
    found = derived(programs.layernorm_apply, acc, {"result": dz}, **link)
    ours = run(
        programs.layernorm_apply_backward, None, shape=(M, N), dtype=torch.float64,
        dz=dz, z=run(programs.layernorm_apply, acc, **link).result, **link,
    )  # fmt: skip
    close(ours.dz, found["d_acc"])
    close(ours.db, found["d_t"])
    close(-ours.v, found["d_s"])
    close(-link["r"] * ours.sdz, found["d_mean"])
    close(ours.zdz, link["r"] * found["d_r"])


def test_cross_entropy_by_hand_equals_derived():
    acc, r, grad = normal(M, N), torch.rand(M, dtype=torch.float64) + 0.5, normal(M)
    target = torch.randint(0, N, (M,))
    zero = torch.zeros(M, dtype=torch.float64)
    upstream = {"lse": grad, "logit": -grad, "expected": zero}
    found = derived(programs.row_scale_lse_target, acc, upstream, r=r, target=target)
    lse = run(programs.row_scale_lse_target, acc, r=r, target=target).lse
    ours = run(programs.cross_entropy_backward, acc, r=r, lse=lse, target=target, grad=grad)
    close(ours.dz, found["d_acc"])
