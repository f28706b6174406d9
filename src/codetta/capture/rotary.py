"""Rotary embedding, recognized by what it computes: x ⊙ cos + (-b, a) ⊙ sin for halves (a, b).

The tables must have equal halves, which :meth:`Lens.is_doubled` proves from how they were made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from codetta.capture.forms import Form, Piece, Rotated, Swapped, Turned, Virtual, same
from codetta.capture.rules import Unliftable

if TYPE_CHECKING:
    from codetta.capture.lens import Lens


def turned(lens: Lens, x: Any, table: Any) -> Turned | None:
    """x ⊙ table, where the table has one row per token and one column per feature of a head."""
    if not isinstance(x, Tensor) or not isinstance(table, Tensor):
        return None
    form = lens.known.get(id(x))
    if not isinstance(form, Form | Piece | Swapped):
        return None
    if isinstance(form, Form) and (len(form.features) != 2 or form.axes[-1].index != 1):
        return None
    if isinstance(form, Piece) and form.negative:
        return None
    base = form if isinstance(form, Form) else form.base
    start = 0 if isinstance(form, Form) else form.start
    stop = base.features[-1] if isinstance(form, Form) else form.stop
    if not _is_table(lens, base, table, stop - start):
        return None
    return Turned(base, start, stop, isinstance(form, Swapped), table)


def _is_table(lens: Lens, base: Form, table: Tensor, columns: int) -> bool:
    if table.ndim > len(base.axes) or not same(table.shape[-1], columns):
        return False
    for size, axis in zip(table.shape[:-1], base.axes[-table.ndim : -1], strict=True):
        if axis.role == "m":
            if not (same(size, base.tokens[axis.index]) or (axis.index == 0 and same(size, 1))):
                return False
        elif not same(size, 1):
            return False
    return lens.is_doubled(table)


def rotated(lens: Lens, x: Any, y: Any) -> Form | Rotated | None:
    a, b = (lens.known.get(id(t)) for t in (x, y))
    if not isinstance(a, Turned) or not isinstance(b, Turned):
        if isinstance(a, Virtual) or isinstance(b, Virtual):
            raise Unliftable("an unknown rotation")
        return None
    plain, swapped = (a, b) if b.swapped else (b, a)
    if plain.swapped or not swapped.swapped or plain.base != swapped.base:
        raise Unliftable("an unknown rotation")
    if (plain.start, plain.stop) != (swapped.start, swapped.stop):
        raise Unliftable("a rotation of different columns")
    found = Rotated(plain.base, plain.start, plain.stop, plain.table, swapped.table)
    if (found.start, found.stop) == (0, found.base.features[-1]):
        return lens.rotation(found)
    if found.start:
        raise Unliftable("a rotation that does not begin with a head's first column")
    return found
