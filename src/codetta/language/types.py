"""What is known about a value before anything runs: its kind, its width and its pair layout.

A value of an epilogue is an array over (rows, columns) of the output. Which of the two axes it
really extends over is its *kind* (a tile has both, a column vector only rows), never inferred from
shapes, because at M = 1 or N = 1 shapes say nothing.

``cols`` counts columns. In a Program it is a multiple of the accumulator's N (1 for the
accumulator, 1/2 for one half of a pair, 2 for the pair that a half-width accumulator expands to,
1/64 for one value per head); in a Plan it is the number itself. All width rules only compare,
halve, double and divide, so one set of rules serves both.

``path`` says how columns of another width lie against the accumulator's: ("adjacent",) is one half
of adjacent pairs, ("expand:adjacent",) the expanded pair, ("group:64",) one value per 64 columns.
Two values of one width and different paths would live in different tiles.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace
from fractions import Fraction

Dim = int | str


class Kind(enum.Enum):
    """Which axes a value extends over, in the names used by annotations and program text."""

    TILE = "Tile"
    ROW = "Row"
    COL = "Col"
    SCALAR = "Scalar"
    INDEX = "Index"
    ROTARY = "Rotary"
    PARTIAL = "Partial"

    def __repr__(self) -> str:
        return self.value


NUMERIC = frozenset({Kind.TILE, Kind.ROW, Kind.COL, Kind.SCALAR})


@dataclass(frozen=True, slots=True)
class Type:
    """Type of a value.

    Attributes:
        kind: the axes it extends over.
        cols: columns, as a multiple of N in a Program and as a number in a Plan; 1 if it has none.
        path: pair layout and grouping relative to the accumulator; () for plain columns.
        rows: "M" for anything over tokens, a number for a weight (Plans only).
        reduced: the value exists only after all tiles of a row or column were combined.
        boolean: the result of a comparison.
    """

    kind: Kind
    cols: Fraction = Fraction(1)
    path: tuple[str, ...] = ()
    rows: Dim = "M"
    reduced: bool = False
    boolean: bool = False

    @property
    def has_rows(self) -> bool:
        return self.kind in (Kind.TILE, Kind.COL, Kind.INDEX, Kind.ROTARY)

    @property
    def has_cols(self) -> bool:
        return self.kind in (Kind.TILE, Kind.ROW)

    def but(self, **changes: object) -> Type:
        return replace(self, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        text = self.kind.value
        if self.has_cols and (self.cols != 1 or self.path):
            text += f"({', '.join([f'width={self.cols}', *self.path])})"
        return ("reduced " if self.reduced else "") + ("boolean " if self.boolean else "") + text


def kind_over(rows: bool, cols: bool) -> Kind:
    """The numeric kind with the given axes."""
    if rows:
        return Kind.TILE if cols else Kind.COL
    return Kind.ROW if cols else Kind.SCALAR


# ------------------------------------------------------------------------------- pair layouts
_HEAD_HALVES = re.compile(r"halves:(\d+)")


def parse_pairs(pairs: object) -> tuple[str, int]:
    """Read a pair layout: ("adjacent", 2), ("halves", 0) for halves of N, ("halves", H) per head.

    Raises:
        ValueError: not a pair layout.
    """
    if pairs == "adjacent":
        return "adjacent", 2
    if pairs == "halves":
        return "halves", 0
    match = _HEAD_HALVES.fullmatch(pairs) if isinstance(pairs, str) else None
    if match and int(match[1]) > 0 and int(match[1]) % 2 == 0:
        return "halves", int(match[1])
    raise ValueError(pairs)


def unpacked(source: Type, pairs: str) -> Type:
    """Type of one member of the pairs of ``source``."""
    path = source.path
    path = path[:-1] if path and path[-1] == f"expand:{pairs}" else (*path, pairs)
    return source.but(cols=source.cols / 2, path=path)


def packed(member: Type, pairs: str) -> Type:
    """Type of the pairs made of two values of type ``member``; inverse of :func:`unpacked`."""
    path = member.path
    path = path[:-1] if path and path[-1] == pairs else (*path, f"expand:{pairs}")
    return member.but(cols=member.cols * 2, path=path)


def grouped(source: Type, size: int) -> Type:
    return source.but(cols=source.cols / size, path=(*source.path, f"group:{size}"))


def default_path(width: Fraction, pairs: str) -> tuple[str, ...]:
    """Path of an operand declared with this width: halves or doubles in the given pair layout."""
    if width == 1:
        return ()
    if width == Fraction(1, 2):
        return (pairs,)
    if width == 2:
        return (f"expand:{pairs}",)
    if width.numerator == 1:
        return (f"group:{width.denominator}",)
    raise ValueError(width)
