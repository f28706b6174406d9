"""SHAPE rules: which kinds, widths and layouts may meet, and the type that comes out.

A rule takes the primitive's name, its attributes and the argument types and returns the result
type; it raises one of the named errors of :mod:`codetta.errors`, to which the tracer adds the
author's line.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from codetta.errors import (
    BadGroup,
    BadPairLayout,
    BadReduction,
    BooleanValue,
    LayoutMismatch,
    MixedReductions,
    ReducedValueInTile,
    WidthMismatch,
    WrongOperandKind,
)
from codetta.language.primitives import COL_REDUCTIONS, COMPARISONS, ROW_REDUCTIONS, SHAPE
from codetta.language.types import (
    NUMERIC,
    Kind,
    Type,
    grouped,
    kind_over,
    packed,
    parse_pairs,
    unpacked,
)

Attrs = Mapping[str, Any]


def join(op: str, types: tuple[Type, ...]) -> Type:
    """Broadcast types of an elementwise map: axes are united, widths and layouts must agree."""
    for t in types:
        if t.kind not in NUMERIC:
            raise WrongOperandKind(op=op, given=f"the {t.kind.value} operand", fix=_HINT[t.kind])
    kinds = {t.kind for t in types}
    rows, cols = any(t.has_rows for t in types), any(t.has_cols for t in types)
    reduced = any(t.reduced for t in types)
    if reduced:
        local = [t for t in types if not t.reduced and t.has_cols and t.has_rows]
        if local:
            raise ReducedValueInTile(op=op, given=_listed(types))
        if Kind.COL in kinds and Kind.ROW in kinds:
            error = MixedReductions if all(t.reduced for t in types) else ReducedValueInTile
            raise error(op=op, given=_listed(types))
    wide = [t for t in types if t.has_cols]
    tall = [t for t in types if t.has_rows]
    if len({t.cols for t in wide}) > 1 or len({t.rows for t in tall}) > 1:
        raise WidthMismatch(op=op, given=_listed(types))
    if len({t.path for t in wide}) > 1:
        raise LayoutMismatch(op=op, given=_listed(types))
    return Type(
        kind_over(rows, cols),
        cols=wide[0].cols if wide else Fraction(1),
        path=wide[0].path if wide else (),
        rows=tall[0].rows if tall else "M",
        reduced=reduced,
    )


def _listed(types: tuple[Type, ...]) -> str:
    return " and ".join(map(str, types))


_HINT = {
    Kind.INDEX: "an Index picks columns, use it in select(value, index)",
    Kind.ROTARY: "a Rotary operand is the second argument of rotate(value, rope)",
    Kind.PARTIAL: "a Partial is combined first, by the reduction that made it",
}


def _numbers(op: str, types: tuple[Type, ...]) -> None:
    if any(t.boolean for t in types):
        raise BooleanValue(op=op, needed="numbers", given=" and ".join(map(str, types)))


@SHAPE.rule(
    *("neg", "abs", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "erf", "sigmoid", "relu"),
    *("pow", "round_to", "add", "sub", "mul", "div", "maximum", "minimum"),
)
def _elementwise(op: str, attrs: Attrs, *types: Type) -> Type:
    _numbers(op, types)
    return join(op, types)


@SHAPE.rule(*COMPARISONS)
def _comparison(op: str, attrs: Attrs, *types: Type) -> Type:
    _numbers(op, types)
    return join(op, types).but(boolean=True)


@SHAPE.rule("where")
def _where(op: str, attrs: Attrs, condition: Type, a: Type, b: Type) -> Type:
    if not condition.boolean:
        raise BooleanValue(op=op, needed="a comparison as its condition", given=str(condition))
    _numbers(op, (a, b))
    return join(op, (condition, a, b))


@SHAPE.rule("broadcast")
def _broadcast(op: str, attrs: Attrs, source: Type) -> Type:
    _numbers(op, (source,))
    axes, path = attrs["axes"], tuple(filter(None, attrs["path"].split("/")))
    rows = source.has_rows or "m" in axes
    cols = source.has_cols or "n" in axes
    target = Type(
        kind_over(rows, cols), rows=source.rows if source.has_rows else attrs.get("rows", "M")
    )
    if cols:
        target = target.but(cols=Fraction(attrs["width"]), path=path)
        if source.has_cols and (source.cols, source.path) != (target.cols, target.path):
            raise WidthMismatch(op=op, given=f"{source} and {target}")
    if source.reduced and rows and cols:
        raise ReducedValueInTile(op=op, given=str(source))
    return target.but(reduced=source.reduced)


def _tile(op: str, source: Type, fix: str) -> None:
    if source.boolean:
        raise BooleanValue(op=op, needed="numbers", given=str(source))
    if source.kind not in (Kind.TILE, Kind.ROW) or source.reduced:
        raise WrongOperandKind(op=op, given=f"a {source}", fix=fix)


def _layout(pairs: object) -> tuple[str, int]:
    try:
        return parse_pairs(pairs)
    except ValueError:
        raise BadPairLayout(given=pairs) from None


@SHAPE.rule("unpack")
def _unpack(op: str, attrs: Attrs, source: Type) -> Type:
    _layout(attrs["pairs"])
    _tile(op, source, "pairs are taken from a tile or a Row operand")
    last = source.path[-1] if source.path else ""
    if last.startswith("expand:") and last != f"expand:{attrs['pairs']}":
        raise LayoutMismatch(op=op, given=f"{source} and pairs {attrs['pairs']!r}")
    return unpacked(source, attrs["pairs"])


@SHAPE.rule("pack")
def _pack(op: str, attrs: Attrs, first: Type, second: Type) -> Type:
    _layout(attrs["pairs"])
    member = join(op, (first, second))
    _numbers(op, (first, second))
    _tile(op, member, "pairs are made of two tiles")
    last = member.path[-1] if member.path else attrs["pairs"]
    if last != attrs["pairs"] and not last.startswith(("group:", "expand:")):
        raise LayoutMismatch(op=op, given=f"{member} and pairs {attrs['pairs']!r}")
    return packed(member, attrs["pairs"])


@SHAPE.rule("rotate")
def _rotate(op: str, attrs: Attrs, source: Type, rope: Type) -> Type:
    if rope.kind is not Kind.ROTARY:
        raise WrongOperandKind(
            op=op, given=f"a {rope} as its second argument", fix="declare it as `rope: Rotary`"
        )
    _tile(op, source, "rotations act on tiles")
    if source.kind is not Kind.TILE:
        raise WrongOperandKind(op=op, given=f"a {source}", fix="rotations act on tiles")
    head_dim, rotary_dim, heads = attrs["head_dim"], attrs["rotary_dim"], attrs["heads"]
    if head_dim < 2 or rotary_dim < 2 or rotary_dim > head_dim or rotary_dim % 2 or heads < -1:
        raise BadGroup(
            op=op,
            given=f"head_dim={head_dim}, rotary_dim={rotary_dim}, heads={heads}",
            reason="the rotated columns are an even number, at least 2 and at most head_dim",
            fix="Use 2 <= rotary_dim <= head_dim, rotary_dim even, heads >= 0 or -1 for all.",
        )
    if attrs["pairs"] not in ("adjacent", "halves"):
        raise BadPairLayout(given=attrs["pairs"])
    return source


def _size(op: str, attrs: Attrs) -> int:
    size = attrs["size"]
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise BadGroup(
            op=op,
            given=f"size={size!r}",
            reason="a group has at least one column",
            fix="Give the number of columns of one group, such as the head dimension.",
        )
    return size


@SHAPE.rule("group_sum")
def _group_sum(op: str, attrs: Attrs, source: Type) -> Type:
    size = _size(op, attrs)
    _tile(op, source, "groups are taken of a tile or a Row operand")
    return grouped(source, size)


@SHAPE.rule("ungroup")
def _ungroup(op: str, attrs: Attrs, source: Type) -> Type:
    size = _size(op, attrs)
    _tile(op, source, "it spreads a value per group")
    path = source.path
    if path and path[-1] != f"group:{size}":
        raise LayoutMismatch(op=op, given=f"{source} and size={size}")
    return source.but(cols=source.cols * size, path=path[:-1])


def _reducible(op: str, source: Type) -> None:
    if source.boolean:
        raise BooleanValue(op=op, needed="numbers", given=str(source))
    if source.reduced:
        raise BadReduction(
            op=op,
            given=f"a {source}",
            fix="What was reduced once is one value per row or column; combine it by arithmetic.",
        )
    if source.kind is not Kind.TILE:
        raise BadReduction(
            op=op,
            given=f"a {source}",
            fix="Combine it with a tile first, as in rowsum(acc * r).",
        )


@SHAPE.rule("rowsum", "rowmax", "rowmean", "rowvar", "rowlse")
def _row_reduction(op: str, attrs: Attrs, source: Type) -> Type:
    if op == "rowsum" and source.kind is Kind.ROW and not source.reduced:
        return Type(Kind.SCALAR, reduced=True)
    _reducible(op, source)
    return Type(Kind.COL, rows=source.rows, reduced=True)


@SHAPE.rule("rowsoftmean")
def _row_softmean(op: str, attrs: Attrs, source: Type, payload: Type) -> Type:
    both = join(op, (source, payload))
    _reducible(op, source)
    _reducible(op, both)
    return Type(Kind.COL, rows=source.rows, reduced=True)


def _index(op: str, index: Type) -> None:
    if index.kind is not Kind.INDEX:
        raise WrongOperandKind(
            op=op, given=f"a {index} as its index", fix="declare the operand as `target: Index`"
        )


@SHAPE.rule("select")
def _select(op: str, attrs: Attrs, source: Type, index: Type) -> Type:
    _index(op, index)
    _reducible(op, source)
    return Type(Kind.COL, rows=source.rows, reduced=True)


@SHAPE.rule("onehot")
def _onehot(op: str, attrs: Attrs, index: Type) -> Type:
    _index(op, index)
    path = tuple(filter(None, attrs["path"].split("/")))
    return Type(Kind.TILE, cols=Fraction(attrs["width"]), path=path, rows=index.rows)


@SHAPE.rule("colsum", "colmax")
def _col_reduction(op: str, attrs: Attrs, source: Type) -> Type:
    if op == "colsum" and source.kind is Kind.COL and not source.reduced:
        return Type(Kind.SCALAR, reduced=True)
    _reducible(op, source)
    return Type(Kind.ROW, cols=source.cols, path=source.path, reduced=True)


@SHAPE.rule("totalsum")
def _total(op: str, attrs: Attrs, source: Type) -> Type:
    _reducible(op, source)
    return Type(Kind.SCALAR, reduced=True)


@SHAPE.rule("combine")
def _combine(op: str, attrs: Attrs, *parts: Type) -> Type:
    for part in parts:
        if part.kind is not Kind.PARTIAL:
            raise WrongOperandKind(
                op=op, given=f"a {part}", fix="it takes the raw partials of a reduction"
            )
    if attrs["reduction"] in ROW_REDUCTIONS:
        return Type(Kind.COL)
    if attrs["reduction"] in COL_REDUCTIONS:
        path = tuple(filter(None, attrs["path"].split("/")))
        return Type(Kind.ROW, cols=Fraction(attrs["width"]), path=path)
    return Type(Kind.SCALAR)
