"""Eager calls like one that was checked before.

Whether the arguments of ``codetta.gemm`` fit depends on their types, shapes, dtypes and devices
alone, and so does the way they become two-dimensional arrays. A call that agrees in these with one
that passed all checks of :mod:`codetta.arguments` skips them: a key, a look-up and the views.

Both are generated per program, without loops over the operands, and take a tenth of the time of the
checks. What a key cannot be made of (a missing operand, no tensor, sizes that are symbols) has not
passed before, so it goes the long way and meets its error there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from codetta import result_types
from codetta.arguments import CallSpec, OperandSpec
from codetta.backends.cuda.capture import capturing
from codetta.kept import outside_pools
from codetta.language.meaning import FP8
from codetta.returns import Shaping

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_KEPT = 4096
#: What making a key of arguments that do not fit may raise.
UNFIT = (AttributeError, IndexError, KeyError, RuntimeError, TypeError)


class Checked(NamedTuple):
    """A call that passed.

    Attributes:
        m: number of rows; ``lead`` the leading dimensions of a.
        views: (operands by name, a, m) -> the flat operands.
        result: (flat results) -> what the caller gets; None if they must be reshaped first.
    """

    m: int
    lead: torch.Size
    views: Callable[..., list[Tensor]]
    result: Callable[[list[Tensor]], Any] | None


_CHECKED: dict[tuple[Any, ...], Checked] = {}


def known(
    spec: CallSpec, a: Any, b: Any, tile: Any, raw: bool, operands: Mapping[str, Any]
) -> Checked | None:
    """The call that passed and agrees with this one."""
    try:
        return _CHECKED.get(_functions(spec)[0](a, b, tile, raw, operands))
    except UNFIT:
        return None


def remember(
    spec: CallSpec,
    a: Tensor,
    b: Tensor,
    tile: tuple[int, int] | None,
    raw: bool,
    operands: Mapping[str, Any],
    shaping: Shaping,
) -> None:
    """Keep a call that has passed; a and b as they were given, without autocast."""
    lead = a.shape[:-1]
    m = lead.numel()
    # Whether fp8 may take part depends on what requires grad; empty shapes are not reshaped by -1.
    if a.dtype in FP8 or spec.stores_fp8 or m == 0 or b.shape[1] == 0:
        return
    tensors = [a, b]
    for value in operands.values():
        tensors += [x for x in _parts(value) if isinstance(x, Tensor)]
    if any(type(x) not in _PLAIN for x in tensors):
        return
    key, views = _functions(spec)
    if len(_CHECKED) >= _KEPT:
        _CHECKED.clear()
    try:
        _CHECKED[key(a, b, tile, raw, operands)] = Checked(m, lead, views, _result(shaping, lead))
    except UNFIT:
        return


def _parts(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _result(shaping: Shaping, lead: torch.Size) -> Callable[[list[Tensor]], Any] | None:
    if len(lead) != 1 or any(e.parts > 1 for e in shaping.entries):
        return None
    if not shaping.type:
        return lambda flat: flat[0]
    made = getattr(result_types, shaping.type)._make
    return lambda flat: made(flat)


# ------------------------------------------------------------------------------- generated
@lru_cache(maxsize=1024)
def _functions(spec: CallSpec) -> tuple[Callable[..., Any], Callable[..., list[Tensor]]]:
    """(a, b, tile, raw, operands) -> key, and (operands, a, m) -> flat operands."""
    fields = [*_fields("a"), *_fields("b")]
    views: list[str] = []
    for o in spec.operands:
        x = f"o[{o.name!r}]"
        if o.kind == "Scalar":
            fields.append(f"scalar({x})")
        elif o.kind == "Rotary":
            fields += [f"len({x})", *_fields(f"{x}[0]"), *_fields(f"{x}[1]")]
        else:
            fields += _fields(x)
        views += _VIEWS[o.kind](o, x)
    scope = {"text": spec.text, "scalar": _scalar_field, "scalar_view": _scalar_view,
             "tile_view": _tile_view, "col_view": _col_view, "positions": _positions}  # fmt: skip
    key = eval(f"lambda a, b, tile, raw, o: (text, tile, raw, len(o), {', '.join(fields)})", scope)
    return key, eval(f"lambda o, a, m: [{', '.join(views)}]", scope)


def _fields(x: str) -> list[str]:
    return [f"{x}.{part}" for part in ("__class__", "shape", "dtype", "device", "layout")]


def _scalar_field(x: Any) -> Any:
    if isinstance(x, Tensor):
        return type(x), x.shape, x.dtype, x.device, x.layout
    return type(x)


#: Texts of the flat tensors of an operand.
_VIEWS: dict[str, Callable[[OperandSpec, str], list[str]]] = {
    "Tile": lambda o, x: [f"tile_view({x}, m)"],
    "Row": lambda o, x: [f"{x}.unsqueeze(0)"],
    "Col": lambda o, x: [f"col_view({x}, m)"],
    "Index": lambda o, x: [f"col_view({x}, m)"],
    "Scalar": lambda o, x: [f"scalar_view({x}, a, o)"],
    "Rotary": lambda o, x: [f"{x}[0]", f"positions({x}[1], a, m)"],
}


def _tile_view(x: Tensor, m: int) -> Tensor:
    return x if x.ndim == 2 else x.reshape(m, -1)


def _col_view(x: Tensor, m: int) -> Tensor:
    if x.ndim == 1:
        return x.unsqueeze(1)
    return x if x.shape == (m, 1) else x.reshape(m, 1)


def _positions(x: Tensor, a: Tensor, m: int) -> Tensor:
    lead = a.shape[:-1]
    if x.shape != lead:
        x = x.expand(lead)
    return x if x.ndim == 1 else x.reshape(m)


def _scalar_view(x: Any, a: Tensor, operands: Mapping[str, Any]) -> Tensor:
    if isinstance(x, Tensor):
        return x if x.shape == (1, 1) else x.reshape(1, 1)
    wide = a.dtype is torch.float64 or any(
        part.dtype is torch.float64
        for value in operands.values()
        for part in _parts(value)
        if isinstance(part, Tensor)
    )
    return number(x, torch.float64 if wide else torch.float32, a.device)


# --------------------------------------------------------------------------------- numbers
def number(x: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A Python number as an array (1, 1), which the caller must not change.

    The last few are kept: on a GPU each is a kernel of its own, longer than the call around it.
    """
    if capturing():  # a graph keeps its own memory
        return torch.full((1, 1), x, dtype=dtype, device=device)
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    return _number(x, math.copysign(1.0, x), dtype, device, stream)


@lru_cache(maxsize=256)
def _number(x: float, sign: float, dtype: torch.dtype, device: torch.device, stream: int) -> Tensor:
    """One per stream, so that no other reads it before it is written; 0 and -0 are two."""
    return outside_pools(device, lambda: torch.full((1, 1), x, dtype=dtype, device=device))
