"""Programs without accumulator, and epilogues on an accumulator that was stored.

Triton runs them (triton_kernels.py); without Triton they are plain PyTorch on the same device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from codetta.backends.calls import REFERENCE
from codetta.backends.select import Bound
from codetta.language.program import Operand, Program
from codetta.language.types import Kind
from codetta.language.values import Node

if TYPE_CHECKING:
    from codetta.plan.plan import Plan


def run(
    program: Program,
    operands: Sequence[Tensor],
    m: int,
    n: int,
    operand: torch.dtype,
    compute: torch.dtype,
    tile: tuple[int, int] | None,
    raw: bool,
) -> list[Tensor]:
    """A program that has no accumulator."""
    if _on_triton(operands[0]):
        from codetta.backends.cuda.triton_kernels import pointwise

        return pointwise(program, operands, m, n, operand, compute, tile, raw)
    return REFERENCE.pointwise(program, operands, m, n, operand, compute, tile, raw)


def bound(program: Program, a: Tensor, n: int) -> Callable[..., list[Tensor]]:
    """(operands, m, n) -> outputs of a finalizer, computed in fp32, on the device of a.

    For operands that agree in shapes, strides, dtypes and alignment from call to call. A large part
    of :func:`run` is to find the kernels; here they are found once.
    """
    if _on_triton(a):
        from codetta.backends.cuda.triton_kernels import Bound as BoundRecipe
        from codetta.backends.cuda.triton_kernels import recipe

        return BoundRecipe(recipe(program, n, a.dtype, torch.float32, None, False))
    run, dtype = REFERENCE.pointwise, a.dtype
    return lambda operands, m, n: run(program, operands, m, n, dtype, torch.float32, None, False)


def bound_to(
    program: Program,
    operands: Sequence[Tensor],
    m: int,
    n: int,
    operand: torch.dtype,
    compute: torch.dtype,
    tile: tuple[int, int] | None,
    raw: bool,
) -> Bound:
    """What :func:`run` has launched for operands like these, on the current device."""
    if _on_triton(operands[0]) and m and n:
        from codetta.backends.cuda.triton_kernels import recipe

        made = recipe(program, n, operand, compute, tile, raw).fixed(operands, m, n)
        if made is not None:
            return Bound(made, frozenset(range(len(operands))))
    return Bound(lambda t: run(program, t, m, n, operand, compute, tile, raw))


def prepare(plan: Plan, weights: Sequence[Tensor]) -> Tensor:
    """Weights folded and packed as a Plan says."""
    if _on_triton(weights[0]):
        from codetta.backends.cuda.triton_prepare import prepare_weights

        return prepare_weights(plan, weights)
    return REFERENCE.prepare(plan, weights)


def prepare_bound(plan: Plan, weights: Sequence[Tensor]) -> Bound:
    """What :func:`prepare` has launched for weights like these, on the current device."""
    if _on_triton(weights[0]):
        from codetta.backends.cuda.triton_prepare import fixed

        if (made := fixed(plan, weights)) is not None:
            return Bound(made, frozenset(range(len(weights))))
    return Bound(lambda t: prepare(plan, t))


def on_accumulator(
    program: Program,
    acc: Tensor,
    operands: Sequence[Tensor],
    operand: torch.dtype,
    tile: tuple[int, int] | None,
    raw: bool,
) -> list[Tensor]:
    """A GEMM's program on its fp32 accumulator (M, N)."""
    m, n = acc.shape
    loaded = accumulator_loaded(program)
    return run(loaded, [acc, *operands], m, n, operand, torch.float32, tile, raw)


@lru_cache(maxsize=1024)
def accumulator_loaded(program: Program) -> Program:
    """The program with its accumulator as a first Tile operand."""
    name = "accumulator"
    while any(o.name == name for o in program.operands):
        name += "_"
    nodes = [
        Node("operand", (), (("name", name),), x.type) if x.op == "acc" else x
        for x in program.nodes
    ]
    operands = [Operand(name, Kind.TILE), *program.operands]
    return Program.build(program.name, operands, nodes, program.outputs, bare=program.bare)


def _on_triton(x: Tensor) -> bool:
    return x.is_cuda and _has_triton()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None
