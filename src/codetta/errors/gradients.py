"""What has no derivative, and where a derivative is refused."""

from __future__ import annotations

from codetta.errors.call import CallError


class OutNeedsNoGrad(CallError, RuntimeError):
    template = (
        "out= and gemm_accumulate_ write into a tensor and have no autograd, but {name} requires "
        "grad. Call it under torch.no_grad(), or leave out= away."
    )
    wrong = "codetta.gemm(a.requires_grad_(), b, out=torch.empty(a.shape[0], b.shape[1]))"
    right = (
        "with torch.no_grad():\n"
        "    codetta.gemm(a.requires_grad_(), b, out=torch.empty(a.shape[0], b.shape[1]))"
    )


class RawNeedsNoGrad(CallError, RuntimeError):
    template = (
        "raw=True returns partials, which have no derivative, but {name} requires grad. Call it "
        "under torch.no_grad(), or leave raw=True away and differentiate the finals."
    )
    wrong = "codetta.gemm(a.requires_grad_(), b, raw=True)"
    right = "with torch.no_grad():\n    codetta.gemm(a.requires_grad_(), b, raw=True)"


class NotDifferentiable(CallError, RuntimeError):
    template = (
        "operand {operand!r} ({kind}) of {program!r} requires grad, but no gradient is defined "
        "for it. Detach it."
    )
    wrong = (
        "p = codetta.programs.row_scale_rotary\n"
        "t = codetta.rotary_table(8, 4).requires_grad_()\n"
        "r, pos = torch.ones(a.shape[0]), torch.zeros(a.shape[0], dtype=torch.long)\n"
        "codetta.gemm(a, b[:, :4], p(head_dim=4), r=r, rope=(t, pos))"
    )
    right = (
        "p = codetta.programs.row_scale_rotary\n"
        "t = codetta.rotary_table(8, 4)\n"
        "r, pos = torch.ones(a.shape[0]), torch.zeros(a.shape[0], dtype=torch.long)\n"
        "codetta.gemm(a, b[:, :4], p(head_dim=4), r=r, rope=(t, pos))"
    )


class Fp8NeedsNoGrad(CallError, RuntimeError):
    template = (
        "program {program!r} runs with {what}, through which no gradient is defined, but {name} "
        "requires grad. Call it under torch.no_grad() or detach {name}; for a gradient, write the "
        "autograd.Function of your fp8 recipe around such calls."
    )
    wrong = (
        "p, sa, sb = codetta.programs.fp8_scaled, torch.ones(a.shape[0]), torch.ones(b.shape[1])\n"
        "x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)\n"
        "codetta.gemm(x.requires_grad_(), y, p, sa=sa, sb=sb)"
    )
    right = (
        "p, sa, sb = codetta.programs.fp8_scaled, torch.ones(a.shape[0]), torch.ones(b.shape[1])\n"
        "x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)\n"
        "codetta.gemm(x, y, p, sa=sa, sb=sb)"
    )


class DoubleBackward(CallError, RuntimeError):
    template = (
        "codetta defines first derivatives only; the backward of {program!r} was itself to be "
        "differentiated (create_graph=True). For second derivatives use the plain PyTorch formula."
    )
    wrong = (
        "x = a.requires_grad_()\n"
        "g, = torch.autograd.grad(codetta.gemm(x, b).pow(2).sum(), x, create_graph=True)\n"
        "g.sum().backward()"
    )
    right = "x = a.requires_grad_()\ntorch.autograd.grad(codetta.gemm(x, b).pow(2).sum(), x)"


class TransformRefused(CallError, RuntimeError):
    template = (
        "codetta.gemm does not work under torch.func.{transform}. Fold the mapped dimension into "
        "the leading dimensions of a (any number is allowed), or use the plain PyTorch formula."
    )
    wrong = "torch.func.vmap(lambda x: codetta.gemm(x, b))(torch.stack([a, a]))"
    right = "codetta.gemm(torch.stack([a, a]), b)"
