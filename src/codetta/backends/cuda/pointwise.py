"""Programs without accumulator, and epilogues on an accumulator that was stored.

Triton runs them (triton_kernels.py); without Triton they are plain PyTorch on the same device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from codetta.backends.calls import REFERENCE
from codetta.language.program import Operand, Program
from codetta.language.types import Kind
from codetta.language.values import Node


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
    if operands[0].is_cuda and _has_triton():
        from codetta.backends.cuda.triton_kernels import pointwise

        return pointwise(program, operands, m, n, operand, compute, tile, raw)
    return REFERENCE.pointwise(program, operands, m, n, operand, compute, tile, raw)


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


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None
