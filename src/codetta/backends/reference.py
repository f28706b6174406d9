"""The reference backend: the executable specification, in plain PyTorch, on any device.

It computes every node of a Program over whole matrices, in fp32 or wider, and honours what a kernel
must honour: the tile shape (raw partials are one value per tile), the finalizers, and the points at
which values are rounded (once, at a store, and where ``round_to`` says so).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from codetta.backends.layout import Tile, default_tile
from codetta.language.meaning import Context, split_pairs, stored
from codetta.language.primitives import COL_REDUCTIONS, MEANING, REDUCTION, REDUCTIONS
from codetta.language.program import Program
from codetta.language.types import Kind, Type
from codetta.language.values import Node, attrs_of


@dataclass(frozen=True, slots=True)
class Partial:
    """Raw state of one reduction: one value per tile and component.

    ``parts[c]`` has shape (M, T_n) for a reduction over columns, (T_m, N) over rows, and
    (T_m, T_n) over both, in the compute dtype.
    """

    op: str
    components: tuple[str, ...]
    parts: tuple[Tensor, ...]


def matmul(a: Tensor, b: Tensor, compute: torch.dtype) -> Tensor:
    """The mainloop: a (M, K) times b (K, N), accumulated in the compute dtype."""
    return a.to(compute) @ b.to(compute)


def execute(
    program: Program,
    ctx: Context,
    operands: Mapping[str, Tensor],
    *,
    acc: Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[dict[str, Tensor], dict[str, Partial]]:
    """Run a Program.

    Args:
        program: any Program; with an ``acc`` node it needs ``acc``.
        ctx: M, N and dtypes.
        operands: two-dimensional arrays: tiles (M, w N), rows (1, w N), columns and indices
            (M, 1), scalars (1, 1), rotary operands as gathered [cos | sin] (M, rotary_dim).
        acc: (M, N) in the compute dtype.
        tile: (tile_m, tile_n); results do not depend on it beyond fp32 reassociation.

    Returns:
        The outputs by name (tiles (M, w N), reduced columns (M,), rows (w N,), scalars ()), and the
        raw partials by name.
    """
    run = _Run(program, ctx, operands, acc, tile or default_tile(program))
    run.all()
    results = {}
    for out in program.outputs:
        value = run.values[out.node]
        results[out.name] = _shaped(value, program.nodes[out.node].type, ctx, out.dtype)
    return results, {name: run.partials[i] for i, name in program.partial_names.items()}


def _shaped(value: Tensor, type_: Type, ctx: Context, dtype: str) -> Tensor:
    rows = ctx.m if type_.has_rows else 1
    cols = ctx.cols(type_.cols) if type_.has_cols else 1
    value = stored(value.expand(rows, cols), ctx.dtype(dtype))
    if type_.kind is Kind.TILE:
        return value.contiguous()
    if type_.kind is Kind.SCALAR:
        return value.reshape(()).clone()
    return value.reshape(-1).clone()


class _Run:
    def __init__(
        self,
        program: Program,
        ctx: Context,
        operands: Mapping[str, Tensor],
        acc: Tensor | None,
        tile: Tile,
    ) -> None:
        self.program, self.ctx, self.operands = program, ctx, operands
        self.acc, self.tile = acc, tile
        self.values: dict[int, Tensor] = {}
        self.partials: dict[int, Partial] = {}

    def all(self) -> None:
        """Evaluate every node in order; a value is dropped after its last use."""
        last = {a: i for i, n in enumerate(self.program.nodes) for a in n.args}
        kept = {o.node for o in self.program.outputs}
        for i, node in enumerate(self.program.nodes):
            self.values[i] = self.compute(i, node)
            for a in node.args:
                if last[a] == i and a not in kept:
                    self.values.pop(a, None)

    def compute(self, i: int, node: Node) -> Tensor:
        if node.op == "acc":
            assert self.acc is not None
            return self.acc
        if node.op == "operand":
            x = self.operands[node.attr("name")]
            return x if node.type.kind is Kind.INDEX else x.to(self.ctx.compute)
        if node.op == "const":
            return torch.full(
                (1, 1), node.attr("value"), dtype=self.ctx.compute, device=self.ctx.device
            )
        if node.op == "extent":
            size = self.ctx.m if node.attr("axis") == "m" else self.ctx.cols(node.attr("width"))
            return torch.full((1, 1), size, dtype=self.ctx.compute, device=self.ctx.device)
        args = [self.values[a] for a in node.args]
        if node.op in REDUCTIONS:
            types = [self.program.nodes[a].type for a in node.args]
            return self.reduce(i, node.op, args, types)
        result: Tensor = MEANING[node.op](self.ctx, attrs_of(node), *args)
        return result

    # ---- reductions
    def reduce(self, i: int, op: str, args: list[Tensor], types: list[Type]) -> Tensor:
        rule = REDUCTION[op]
        x, extra = args[0], args[1:]
        if op in COL_REDUCTIONS:
            parts = self.over_rows(op, x)
            self.partials[i] = Partial(op, rule.components, parts)
            return rule.combine(*(p.T for p in parts))[None, :]
        source = types[0]
        x, extra = self.in_tile_order(op, source, x, extra)
        width = max(1, int(self.tile[1] * source.cols))
        parts = _row_partials(op, x, extra, width)
        if op == "totalsum":
            parts = tuple(_row_partials("rowsum", p.T, [], self.tile[0])[0].T for p in parts)
            self.partials[i] = Partial(op, rule.components, parts)
            return parts[0].sum().reshape(1, 1)
        self.partials[i] = Partial(op, rule.components, parts)
        return rule.combine(*parts)[:, None]

    def over_rows(self, op: str, x: Tensor) -> tuple[Tensor, ...]:
        row_op = "rowmax" if op == "colmax" else "rowsum"
        return tuple(p.T for p in _row_partials(row_op, x.T, [], self.tile[0]))

    def in_tile_order(
        self, op: str, source: Type, x: Tensor, extra: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Where halves of N are paired, a tile holds columns of both: reorder to tile order."""
        if not (self.program.uses_halves and source.cols == 1 and not source.path):
            return x, extra
        half = x.shape[1] // 2
        if op == "select":
            j = extra[0]
            inside = (j >= 0) & (j < x.shape[1])
            extra = [torch.where(inside, (j % half) * 2 + j // half, j)]
        elif extra:
            extra = [_interleave(extra[0].expand_as(x))]
        return _interleave(x), extra


def _interleave(x: Tensor) -> Tensor:
    return torch.stack(split_pairs(x, "halves"), dim=2).reshape(x.shape)


def _row_partials(op: str, x: Tensor, extra: list[Tensor], width: int) -> tuple[Tensor, ...]:
    """Partials of a reduction over columns: x (M, C) -> components (M, ceil(C / width))."""
    m, c = x.shape
    width = min(width, max(c, 1))  # a tile larger than the matrix needs no padding
    tiles = -(-c // width)
    padding = tiles * width - c
    valid = None
    if padding:
        x = torch.nn.functional.pad(x, (0, padding))
        valid = (torch.arange(tiles * width, device=x.device) < c).reshape(tiles, width)
    if op == "rowsoftmean":
        payload = torch.nn.functional.pad(extra[0].expand(m, c), (0, padding))
        extra = [payload.reshape(m, tiles, width)]
    if op == "totalsum":
        op = "rowsum"
    parts: tuple[Tensor, ...] = REDUCTION[op].partial(x.reshape(m, tiles, width), valid, *extra)
    return parts
