"""What ``codetta.gemm`` returns: named tuples in the caller's shapes, or the caller's ``out``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from codetta import result_types
from codetta.arguments import check_tensor
from codetta.backends.layout import Result, compute_dtype, default_tile, results
from codetta.errors import BadOut
from codetta.language.program import Program


class Entry(NamedTuple):
    """One field of the result: its name, whether its first axis is M, its components.

    The tuple types are given by name, as attributes of :mod:`codetta.result_types`: Dynamo can
    build an instance of a class it finds there, but not of one that is a constant of its own.
    """

    name: str
    has_lead: bool
    parts: int
    components: str  # type of a partial's components, "" if it is one tensor


class Shaping(NamedTuple):
    entries: tuple[Entry, ...]
    type: str  # type of the results, "" if there is a single one


@lru_cache(maxsize=1024)
def shaping(program: Program, raw: bool) -> Shaping:
    """How flat results become what the caller gets; the tuple types are made once per program."""
    entries = tuple(_entry(r) for r in results(program, raw))
    if program.bare and len(entries) == 1:
        return Shaping(entries, "")
    return Shaping(entries, result_types.make(program.name, [e.name for e in entries]))


def _entry(result: Result) -> Entry:
    parts = max(1, len(result.components))
    made = result_types.make(result.name, result.components) if parts > 1 else ""
    return Entry(result.name, result.axes[:1] == ("m",), parts, made)


def shaped(flat: Sequence[Tensor], how: Shaping, lead: torch.Size) -> Any:
    """Results in the caller's shapes: the M rows get the leading dimensions of a back."""
    reshape = len(lead) != 1
    values: list[Any] = []
    i = 0
    for entry in how.entries:
        parts = flat[i : i + entry.parts]
        i += entry.parts
        if reshape and entry.has_lead:
            parts = [x.reshape(lead + x.shape[1:]) for x in parts]
        made = getattr(result_types, entry.components) if entry.components else None
        values.append(made(*parts) if made else parts[0])
    return getattr(result_types, how.type)(*values) if how.type else values[0]


# ------------------------------------------------------------------------------------- out=
def check_out(
    program: Program,
    out: Any,
    a: Tensor,
    n: int,
    flat: Sequence[Tensor],
    lead: torch.Size,
    inputs: Iterable[tuple[str, Tensor]],
) -> dict[str, Tensor]:
    """``out`` as a dict from output name to tensor, each of the right shape, dtype and device.

    Under Dynamo, which must not trace into the language, :func:`write` does the checking.

    Raises:
        BadOut: names, shapes, dtypes or devices do not fit, or memory is shared.
    """
    expected = {r.name: r for r in results(program)}
    named = {program.outputs[0].name: out} if isinstance(out, Tensor) else out
    if not isinstance(named, dict) or set(named) != set(expected):
        given = ", ".join(named) if isinstance(named, dict) else f"a {type(out).__name__}"
        raise BadOut(what=f"({given})", reason=f"the outputs are {', '.join(expected)}")
    compute = compute_dtype(a.dtype, flat)
    taken = list(inputs)
    for name, x in named.items():
        check_tensor(f"out {name!r}", x)
        result = expected[name]
        shape = tuple(result.shape(a.shape[0], n, default_tile(program)))
        shape = (*lead, *shape[1:]) if result.axes[:1] == ("m",) else shape
        _check_like(name, x, shape, result.storage(a.dtype, compute), a.device)
        check_no_overlap(name, x, taken)
        taken.append((f"out {name!r}", x))
    return named


def _check_like(
    name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    pairs = (
        ("shape", tuple(x.shape), shape),
        ("dtype", x.dtype, dtype),
        ("device", x.device, device),
    )
    for what, given, wanted in pairs:
        if given != wanted:
            raise BadOut(what=repr(name), reason=f"its {what} is {given}, the result's is {wanted}")


def check_no_overlap(name: str, x: Tensor, others: Iterable[tuple[str, Tensor]]) -> None:
    """Raise BadOut if x shares memory with one of the others, or overlaps itself."""
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        raise BadOut(what=repr(name), reason="it is expanded: several elements share memory")
    for other, y in others:
        if _overlap(x, y):
            raise BadOut(what=repr(name), reason=f"it shares memory with {other}")


def _overlap(x: Tensor, y: Tensor) -> bool:
    if x.is_meta or x.numel() == 0 or y.numel() == 0:
        return False
    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return False
    (x0, x1), (y0, y1) = _span(x), _span(y)
    return x0 < y1 and y0 < x1


def _span(x: Tensor) -> tuple[int, int]:
    """First byte and the one behind the last that x touches."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()


def write(out: Any, values: Any) -> Any:
    """Copy shaped results into ``out``, a tensor or a dict of all of them; returns the targets."""
    if isinstance(values, Tensor):
        values = (values,)
        names: tuple[str, ...] = ("result",)
        made = None
    else:
        names, made = values._fields, type(values)
    targets = [out] if isinstance(out, Tensor) else [out[name] for name in names]
    for name, target, value in zip(names, targets, values, strict=True):
        _check_like(name, target, tuple(value.shape), value.dtype, value.device)
        target.copy_(value)
    return targets[0] if made is None or isinstance(out, Tensor) else made(*targets)
