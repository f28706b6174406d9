"""Layouts of parameters: rows of weights, stacked, sliced, interleaved and permuted; vectors, too.

Weight preparation is made of these, and the gradients of packed weights are taken apart by them.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from codetta.kept import kept
from codetta.language.meaning import Context
from codetta.language.types import Kind, Type
from codetta.language.values import Value
from codetta.plan.operations import OPERATIONS, Attrs, Operation, check_tiles, matrix, misfit


# --------------------------------------------------------------------------- rows of weights
def _stack_shape(plan: str, attrs: Attrs, *types: Type) -> Type:
    check_tiles(plan, "stack_rows", types)
    if len({t.cols for t in types}) != 1:
        raise misfit(plan, "stack_rows", types, "the numbers of columns differ")
    return matrix(sum(int(t.rows) for t in types), types[0].cols)


def _stack_derivative(d: Value, y: Value, attrs: Attrs, *xs: Value) -> tuple[Value, ...]:
    parts, start = [], 0
    for x in xs:
        stop = start + int(x.type.rows)
        parts.append(d.tracer.emit("slice_rows", d, start=start, stop=stop))
        start = stop
    return tuple(parts)


OPERATIONS["stack_rows"] = Operation(
    _stack_shape, lambda ctx, attrs, *xs: torch.cat(xs, dim=0), _stack_derivative
)
OPERATIONS["slice_rows"] = Operation(
    lambda plan, attrs, x: matrix(attrs["stop"] - attrs["start"], x.cols),
    lambda ctx, attrs, x: x[attrs["start"] : attrs["stop"]],
    lambda d, y, attrs, x: (
        d.tracer.emit("pad_rows", d, start=attrs["start"], total=int(x.type.rows)),
    ),
    view=True,
)
OPERATIONS["pad_rows"] = Operation(
    lambda plan, attrs, x: matrix(attrs["total"], x.cols),
    lambda ctx, attrs, x: torch.nn.functional.pad(
        x, (0, 0, attrs["start"], attrs["total"] - attrs["start"] - x.shape[0])
    ),
    lambda d, y, attrs, x: (
        d.tracer.emit(
            "slice_rows", d, start=attrs["start"], stop=attrs["start"] + int(x.type.rows)
        ),
    ),
)


def _interleave_shape(plan: str, attrs: Attrs, a: Type, b: Type) -> Type:
    check_tiles(plan, "interleave_rows", (a, b))
    if (a.rows, a.cols) != (b.rows, b.cols):
        raise misfit(plan, "interleave_rows", (a, b), "the sizes differ")
    return matrix(2 * int(a.rows), a.cols)


OPERATIONS["interleave_rows"] = Operation(
    _interleave_shape,
    lambda ctx, attrs, a, b: torch.stack((a, b), dim=1).reshape(2 * a.shape[0], a.shape[1]),
    lambda d, y, attrs, a, b: tuple(d.tracer.emit("every_other_row", d, member=i) for i in (0, 1)),
)
OPERATIONS["every_other_row"] = Operation(
    lambda plan, attrs, x: matrix(int(x.rows) // 2, x.cols),
    lambda ctx, attrs, x: x[attrs["member"] :: 2],
    lambda d, y, attrs, x: (
        d.tracer.emit("interleave_rows", *((d, d * 0.0) if attrs["member"] == 0 else (d * 0.0, d))),
    ),
    view=True,
)


def permutation(attrs: Attrs, rows: int) -> list[int]:
    """Source row of each row when rotate-half heads become adjacent-pair heads (or back).

    Within the first ``rotary_dim`` rows of each of the first ``heads`` heads of ``head_dim`` rows,
    row i and row i + rotary_dim / 2 become rows 2i and 2i + 1.
    """
    source = list(range(rows))
    half = attrs["rotary_dim"] // 2
    for head in range(attrs["heads"]):
        base = head * attrs["head_dim"]
        for i in range(half):
            for member in (0, 1):
                adjacent, halves = base + 2 * i + member, base + member * half + i
                if attrs["inverse"]:
                    source[halves] = adjacent
                else:
                    source[adjacent] = halves
    return source


def _permuted(ctx: Context, attrs: Attrs, x: Tensor) -> Tensor:
    rows, device = x.shape[0], x.device
    # Kept, because to copy it to the device waits for the device.
    source = kept(
        device,
        ("source rows", *attrs.items(), rows),
        lambda: torch.tensor(permutation(attrs, rows), device=device),
    )
    return x.index_select(0, source)


OPERATIONS["permute_rows"] = Operation(
    lambda plan, attrs, x: x,
    _permuted,
    lambda d, y, attrs, x: (
        d.tracer.emit("permute_rows", d, **(dict(attrs) | {"inverse": not attrs["inverse"]})),
    ),
)


OPERATIONS["transpose"] = Operation(  # of weights stored (K, N), so that all rules see (N, K)
    lambda plan, attrs, x: matrix(int(x.cols), int(x.rows)),
    lambda ctx, attrs, x: x.mT,
    lambda d, y, attrs, x: (d.tracer.emit("transpose", d),),
    view=True,
)


# ---------------------------------------------------------------------- vectors over weights
OPERATIONS["to_row"] = Operation(
    lambda plan, attrs, x: Type(Kind.ROW, cols=Fraction(x.rows)),
    lambda ctx, attrs, x: x.mT,
    lambda d, y, attrs, x: (d.tracer.emit("to_col", d),),
    view=True,
)
OPERATIONS["to_col"] = Operation(
    lambda plan, attrs, x: Type(Kind.COL, rows=int(x.cols)),
    lambda ctx, attrs, x: x.mT,
    lambda d, y, attrs, x: (d.tracer.emit("to_row", d),),
    view=True,
)


def _vectors_shape(plan: str, attrs: Attrs, *types: Type) -> Type:
    return Type(Kind.COL, rows=sum(int(t.rows) for t in types))


OPERATIONS["stack_vectors"] = Operation(
    _vectors_shape,
    lambda ctx, attrs, *xs: torch.cat(xs, dim=0),
    lambda d, y, attrs, *xs: tuple(
        d.tracer.emit("slice_vector", d, start=start, stop=start + int(x.type.rows))
        for x, start in zip(xs, _starts(xs), strict=True)
    ),
)
OPERATIONS["slice_vector"] = Operation(
    lambda plan, attrs, x: x.but(rows=attrs["stop"] - attrs["start"]),
    lambda ctx, attrs, x: x[attrs["start"] : attrs["stop"]],
    lambda d, y, attrs, x: (None,),  # appears in derivatives only
    view=True,
)
OPERATIONS["permute_vector"] = Operation(
    OPERATIONS["permute_rows"].shape,
    OPERATIONS["permute_rows"].meaning,
    lambda d, y, attrs, x: (
        d.tracer.emit("permute_vector", d, **(dict(attrs) | {"inverse": not attrs["inverse"]})),
    ),
)


def _starts(xs: tuple[Value, ...]) -> list[int]:
    starts = [0]
    for x in xs[:-1]:
        starts.append(starts[-1] + int(x.type.rows))
    return starts
