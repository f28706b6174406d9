"""Derivatives of ``codetta.gemm``: an autograd.Function around the library operators.

Backward of out = program(a b, operands), given the cotangents of its outputs:

    pointwise passes     d_acc and d_operand, by codetta.language.vjp
    dgrad                d_a = d_acc bᵀ
    wgrad                d_b = aᵀ d_acc

Each line is a call of a library operator, so a dispatch trace shows all of them, and each is run
only if its result is asked for: a frozen b costs no wgrad, a frozen a no dgrad, an operand that
needs no gradient no pass. A gradient that is an incoming cotangent as it stands (of a residual, of
a plain store) is handed on without a pass; incoming gradients are never written to.

Eager calls and compiled graphs share this Function: it is also the Autograd kernel of the operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from codetta.backends.layout import compute_dtype, parsed
from codetta.backends.select import chosen_backend, use_backend
from codetta.backward import differentiated, schedule
from codetta.errors import (
    DoubleBackward,
    OutNeedsNoGrad,
    RawNeedsNoGrad,
    TransformRefused,
)
from codetta.language.program import Program
from codetta.language.types import Kind
from codetta.ops import IDENTITY, run_gemm, run_pointwise
from codetta.ops.library import GEMM_ACCUMULATE_, POINTWISE


# ------------------------------------------------------------------------------ the Function
class Gemm(torch.autograd.Function):
    """``Gemm.apply(program, tile, a, b, *operands)`` on canonical arrays -> outputs in order."""

    @staticmethod
    def forward(
        ctx: Any,
        program: Program,
        tile: tuple[int, int] | None,
        a: Tensor,
        b: Tensor,
        *operands: Tensor,
    ) -> tuple[Tensor, ...]:
        _, _, need_a, need_b, *need = ctx.needs_input_grad
        wrt, dtypes = differentiated(program, operands, need_a or need_b, need)
        plan = schedule(program, wrt, tuple(o.name for o in program.outputs), dtypes)
        outputs = run_gemm(plan.forward, a, b, operands, tile=tile)
        named = dict(zip((o.name for o in plan.forward.outputs), outputs, strict=True))
        arrays = _by_operand(program, operands)
        names: list[tuple[str, int]] = []
        kept: list[Tensor] = []
        for name in sorted(plan.reads):
            found = arrays[name] if name in arrays else (named[_stored_as(name, named)],)
            names.append((name, len(found)))
            kept += found
        ctx.save_for_backward(*kept, *((b,) if need_a else ()), *((a,) if need_b else ()))
        ctx.set_materialize_grads(False)
        ctx.program, ctx.wrt, ctx.dtypes, ctx.names = program, wrt, dtypes, names
        ctx.sizes = (a.shape[0], b.shape[1], a.shape[1])
        ctx.operand, ctx.compute = a.dtype, compute_dtype(a.dtype, operands)
        ctx.device, ctx.backend = a.device, chosen_backend()
        ctx.shapes = [(x.shape, x.dtype) for x in operands]
        return tuple(outputs[: len(program.outputs)])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = len(ctx.needs_input_grad)
        if all(d is None for d in cotangents):
            return (None,) * inputs
        # Autograd may run this in a thread of its own, which knows nothing of use_backend.
        with torch.no_grad(), use_backend(ctx.backend):
            gradients = _gradients(ctx, cotangents)
        if torch.is_grad_enabled():  # create_graph=True: what we return must not look constant
            gradients = _Undifferentiable.guard(ctx.program.name, gradients)
        return None, None, *gradients


def _by_operand(program: Program, operands: Sequence[Tensor]) -> dict[str, tuple[Tensor, ...]]:
    arrays = iter(operands)
    return {
        o.name: (next(arrays), next(arrays)) if o.kind is Kind.ROTARY else (next(arrays),)
        for o in program.operands
    }


def _stored_as(name: str, outputs: dict[str, Tensor]) -> str:
    """``saved_x`` is the output x; ``saved_acc`` is an output of that very name."""
    return name if name in outputs else name.removeprefix("saved_")


# ------------------------------------------------------------------------------ the backward
def _gradients(ctx: Any, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    program: Program = ctx.program
    m, n, k = ctx.sizes
    saved = list(ctx.saved_tensors)
    arrays: dict[str, tuple[Tensor, ...]] = {}
    for name, count in ctx.names:
        arrays[name] = tuple(saved[:count])
        del saved[:count]
    given = {o.name: d for o, d in zip(program.outputs, cotangents, strict=True) if d is not None}
    plan = schedule(program, ctx.wrt, tuple(given), ctx.dtypes)
    arrays |= {f"d_{name}": (d,) for name, d in given.items()}
    for p in plan.passes:
        flat = [
            x if x.ndim == 2 or o.kind is Kind.ROTARY else _canonical(x, o.kind)
            for o in p.operands
            for x in arrays[o.name]
        ]
        made = run_pointwise(p, flat, m, n, ctx.operand, ctx.compute)
        arrays |= {o.name: (x,) for o, x in zip(p.outputs, made, strict=True)}
    for name, source in plan.copies:
        arrays[name] = arrays[source]

    _, _, need_a, need_b, *need = ctx.needs_input_grad
    gradients: list[Tensor | None] = [None, None]
    if "d_acc" in arrays:
        d_acc = arrays["d_acc"][0].to(ctx.operand)
        if need_a:
            gradients[0] = run_gemm(IDENTITY, d_acc, saved.pop(0).t())[0]
        if need_b:
            gradients[1] = run_gemm(IDENTITY, saved.pop(0).t(), d_acc)[0]
    elif need_a or need_b:
        like = {"dtype": ctx.operand, "device": ctx.device}
        gradients = [
            torch.zeros(m, k, **like) if need_a else None,
            torch.zeros(k, n, **like) if need_b else None,
        ]
    owners = [o.name for o in program.operands for _ in range(1 + (o.kind is Kind.ROTARY))]
    for name, wanted, (shape, dtype) in zip(owners, need, ctx.shapes, strict=True):
        if not wanted:
            gradients.append(None)
        elif f"d_{name}" in arrays:
            g = arrays[f"d_{name}"][0].to(dtype)
            # A view of an incoming gradient would let autograd take its memory for its own.
            gradients.append(g if g.shape == shape else g.reshape(shape))
        else:
            gradients.append(torch.zeros(shape, dtype=dtype, device=ctx.device))
    return gradients


def _canonical(x: Tensor, kind: Kind) -> Tensor:
    """A reduced result, or its cotangent, as an operand: (M,) -> (M, 1), (C,) -> (1, C)."""
    if kind is Kind.SCALAR:
        return x.reshape(1, 1)
    return x.unsqueeze(0 if kind is Kind.ROW else 1)


class _Undifferentiable(torch.autograd.Function):
    """Identity whose backward refuses: the gradients of a Gemm depend on its inputs, and a second
    derivative that silently left that out would be wrong."""

    @staticmethod
    def guard(name: str, gradients: list[Tensor | None]) -> list[Tensor | None]:
        present = [g for g in gradients if g is not None]
        if not present:
            return gradients
        anchor = torch.empty(0, requires_grad=True)  # makes the results require grad
        guarded = iter(_Undifferentiable.apply(name, anchor, *present))
        return [None if g is None else next(guarded) for g in gradients]

    @staticmethod
    def forward(ctx: Any, name: str, anchor: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        raise DoubleBackward(program=ctx.name)


# --------------------------------------------------------------------------- what is refused
def refuse_transforms(tensors: Sequence[Tensor]) -> None:
    """Raise TransformRefused under torch.func transforms and for forward-mode duals."""
    if torch._C._are_functorch_transforms_active():
        interpreter = torch._C._functorch.peek_interpreter_stack()
        raise TransformRefused(transform=interpreter.key().name.lower() if interpreter else "func")
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise TransformRefused(transform="jvp")


def first_requiring_grad(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the first tensor that makes autograd record this call, or None."""
    if not torch.is_grad_enabled():
        return None
    return next((name for name, x in named if x.requires_grad), None)


# ---------------------------------------------------- Autograd kernels of the library operators
# codetta.ops.library installs them; eager codetta.gemm calls the Function directly.
def gemm_autograd(
    program: str, a: Tensor, b: Tensor, operands: Sequence[Tensor], tile: Sequence[int], raw: bool
) -> list[Tensor]:
    used = (tile[0], tile[1]) if tile else None
    named = [("a", a), ("b", b), *(("an operand", x) for x in operands)]
    name = first_requiring_grad(named)
    if name is None:
        return run_gemm(parsed(program), a, b, operands, tile=used, raw=raw)
    if raw:
        raise RawNeedsNoGrad(name=name)
    refuse_transforms([a, b, *operands])
    return list(Gemm.apply(parsed(program), used, a, b, *operands))


def pointwise_autograd(
    program: str,
    operands: Sequence[Tensor],
    m: int,
    n: int,
    operand_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    tile: Sequence[int],
    raw: bool,
) -> list[Tensor]:
    if first_requiring_grad(("", x) for x in operands) is not None:
        raise DoubleBackward(program=parsed(program).name)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        outputs: list[Tensor] = POINTWISE(
            program, operands, m, n, operand_dtype, compute_dtype, tile, raw
        )
    return outputs


def gemm_accumulate_autograd(target: Tensor, a: Tensor, b: Tensor) -> None:
    name = first_requiring_grad((("target", target), ("a", a), ("b", b)))
    if name is not None:
        raise OutNeedsNoGrad(name=name)
    with torch._C._AutoDispatchBelowAutograd():
        GEMM_ACCUMULATE_(target, a, b)
