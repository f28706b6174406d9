"""Which configurations are worth measuring, and the GEMM kernels to measure them on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from codetta.backends.cuda.configs import Configuration, ab_stages, illegal
from codetta.backends.cuda.forms import ELEMENT, Lowered
from codetta.language.program import Program
from codetta.language.types import Kind

_COOPERATIVE = (
    (256, 128), (256, 160), (256, 192), (256, 208), (128, 224), (128, 256), (192, 128), (192, 160),
    (192, 256),
)  # fmt: skip
_PINGPONG = ((128, 128), (128, 160), (128, 192), (128, 208), (192, 128), (64, 192), (64, 256))
_CLUSTERS = ((2, 1), (1, 2), (1, 1))


def configurations(lowered: Lowered) -> list[Configuration]:
    """Legal configurations of an epilogue, without variants of the raster order.

    Single CTAs are tried for the two commonest tiles; narrow epilogue tiles where that gives the
    A/B pipeline a stage more than it would have, and it has few.
    """
    found = []
    for pingpong, tiles in ((True, _PINGPONG), (False, _COOPERATIVE)):
        for tile in tiles:
            for cluster in _CLUSTERS:
                if cluster == (1, 1) and tile not in ((128, 128), (256, 128)):
                    continue
                config = Configuration(*tile, pingpong, *cluster)
                found += [config, *_narrow(lowered, config)]
    return [c for c in found if illegal(lowered, c) is None]


def _narrow(lowered: Lowered, config: Configuration) -> Iterator[Configuration]:
    narrow = replace(config, epi_n=16)
    stages = ab_stages(lowered, config)
    helps = stages < ab_stages(lowered, narrow) and stages <= 3
    if lowered.mode == ELEMENT and helps and config.cluster_n == 1:
        yield narrow


def raster_variants(config: Configuration) -> list[Configuration]:
    """The same kernel with tiles visited in another order; nothing is compiled for that."""
    return [replace(config, max_swizzle=s) for s in (4, 16) if s != config.max_swizzle]


@dataclass(frozen=True)
class Problem:
    """A GEMM kernel of one shape.

    Attributes:
        layout: 'nt', 'nn' or 'tn', see :func:`codetta.backends.cuda.configs.choose`.
        operand: 'bf16' or 'fp16', of a, b and all tiles.
        dtypes: of the flat operands, by name; () for the operand's dtype where it is a matrix and
            fp32 where it is not.
    """

    program: Program
    m: int
    n: int
    k: int
    layout: str = "nt"
    operand: str = "bf16"
    dtypes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.layout} {self.program.name}"

    @property
    def flat_dtypes(self) -> tuple[str, ...]:
        """Dtypes of the flat operands, a rotary one being two."""
        if self.dtypes:
            return self.dtypes
        found: list[str] = []
        for o in self.program.operands:
            found += {
                Kind.TILE: [self.operand], Kind.INDEX: ["int64"], Kind.ROTARY: ["fp32", "int64"],
            }.get(o.kind, ["fp32"])  # fmt: skip
        return tuple(found)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
          "int64": torch.int64, "int32": torch.int32}  # fmt: skip


def arrays(
    problem: Problem, device: torch.device | str, seed: int = 0
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """a (M, K), b (K, N) and the flat operands: random numbers, since power depends on them."""
    device, dtypes = torch.device(device), iter(problem.flat_dtypes)
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        if generator is None or not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.randn(shape, dtype=dtype, device=device, generator=generator).mul_(scale)

    m, n, k, own = problem.m, problem.n, problem.k, DTYPES[problem.operand]
    plain_a, plain_b = (side == "n" for side in problem.layout)
    a = normal(m, k, dtype=own) if plain_a else normal(k, m, dtype=own).t()
    scale = k**-0.5
    b = (
        normal(k, n, dtype=own, scale=scale)
        if plain_b
        else normal(n, k, dtype=own, scale=scale).t()
    )
    operands: list[Tensor] = []
    for o in problem.program.operands:
        columns, dtype = int(n * o.width), DTYPES[next(dtypes)]
        if o.kind is Kind.ROTARY:
            nodes = (x for x in problem.program.nodes if x.op == "rotate")
            dim = next(int(x.attr("rotary_dim")) for x in nodes)
            positions = torch.arange(m, dtype=DTYPES[next(dtypes)], device=device)
            operands += [normal(m, dim, dtype=dtype), positions]
            continue
        shape = {Kind.TILE: (m, columns), Kind.ROW: (1, columns), Kind.SCALAR: (1, 1)}
        operands.append(normal(*shape.get(o.kind, (m, 1)), dtype=dtype))
    return a, b, operands


def unit(program: Program) -> int:
    """Columns that N must be a multiple of, with half-width operands in whole 16 bytes."""
    widths = [o.width for o in program.operands if o.kind in (Kind.TILE, Kind.ROW)]
    narrowest = min([*widths, Fraction(1)])
    return int(program.granule * 8 / narrowest)
