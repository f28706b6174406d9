"""Which columns a block holds: every structural primitive as arithmetic on column numbers.

A generated kernel never shuffles an array to unpack, pack, rotate or group it. It asks for a value
*at* a block of columns, and each structural primitive translates that question for its argument:

    unpack(x, 'halves:H') at q   is  x at (q // h) H + k h + q % h,  h = H / 2, member k
    pack(a, b) at member k of q  is  a or b at q
    rotate(x) at c               is  x at c and x at the partner of c, times cos and sin
    ungroup(v, S) at c           is  v at c // S

At the ends of the chain stand loads, which compute addresses anyway, and stores, whose columns are
chosen so that the questions have static answers. A block used twice is loaded once (values are
memoized by block). Only adjacent pairs are split in registers: they lie in one thread, and loading
every other element would waste half of each transaction.

A *run* is the block a tile naturally covers: ``count`` pieces of ``size`` columns, each padded to a
power of two because Triton's ranges are powers of two. With power-of-two sizes it is one contiguous
piece; only heads or groups such as 96 need padding, which a mask hides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from codetta.language.types import parse_pairs

Key = tuple[Any, ...]


def power_of_two(x: int) -> int:
    """The smallest power of two that is at least x (and 1)."""
    return 1 << max(x - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` pieces of ``size`` columns of a value of the given width, padded to ``padded``."""

    width: Fraction
    count: int
    size: int
    padded: int

    @staticmethod
    def of(width: Fraction, count: int, size: int) -> Run:
        padded = power_of_two(size)
        return Run(width, 1, count * size, count * size) if padded == size else Run(
            width, count, size, padded
        )  # fmt: skip

    @property
    def block(self) -> int:
        return self.count * self.padded

    @property
    def contiguous(self) -> bool:
        return self.size == self.padded


@dataclass(frozen=True, slots=True)
class Columns:
    """A block of columns: names of its index and validity, both (1, block), and its origin.

    Attributes:
        key: identity; equal keys are the same columns.
        index: variable with the int32 column numbers.
        valid: variable that is true for columns inside the matrix.
        block: number of columns, a power of two.
        width: of the value whose columns they are, as a multiple of N.
        run: if it is one.
        member: (columns of the pairs, pair layout, which) if it is one member of pairs.
        within: (other columns, head): a permutation of those that stays inside heads of that size.
    """

    key: Key
    index: str
    valid: str
    block: int
    width: Fraction
    run: Run | None = None
    member: tuple[Columns, str, int] | None = None
    within: tuple[Columns, int] | None = None


@dataclass(frozen=True, slots=True)
class Val:
    """A value of the kernel: its variable, the axes it really has, and when it is known.

    Attributes:
        name: variable.
        rows: it has one row per row of the block, else 1.
        cols: number of columns of the block, 0 if it has none (its shape is then 1).
        after: it is known only after the loop (made of completed reductions).
    """

    name: str
    rows: bool
    cols: int
    after: bool = False


class ColumnSpace:
    """Makes the blocks of one kernel, once each.

    Args:
        line: emits ``name = expression`` where columns are known and returns the name.
        total: expression for the number of columns of a width.
        limit: expression for the end of the columns of a width that this block may touch.
        start: expression for the first column of this block at a width.
        pieces: number of pieces of the natural run.
        piece: columns of a piece, at width 1: a multiple of the program's granule.
        inside: every block is one piece and lies in the matrix as a whole. Validity is then a
            constant, and so is the head or group that is a block: no predicates, no selects.
    """

    def __init__(
        self,
        line: Callable[[str, str], str],
        total: Callable[[Fraction], str],
        limit: Callable[[Fraction], str],
        start: Callable[[Fraction], str],
        pieces: int,
        piece: int,
        inside: bool = False,
    ) -> None:
        self._line, self._total, self._limit, self._start = line, total, limit, start
        self.pieces, self.piece, self.inside = pieces, piece, inside
        self._made: dict[Key, Columns] = {}
        self._divided: dict[Key, tuple[str, str]] = {}

    # ---- runs
    def natural(self, width: Fraction) -> Columns:
        """The columns of a value of this width that this block covers."""
        size = self.piece * width
        assert size.denominator == 1, (self.piece, width)
        return self.run(Run.of(width, self.pieces, int(size)))

    def run(self, run: Run) -> Columns:
        key: Key = ("run", run)
        if key not in self._made:
            p = f"tl.arange(0, {run.block})[None, :]"
            start = self._start(run.width)
            if run.contiguous:
                index = self._line("c", f"{start} + {p}")
                if self.inside:
                    text = f"tl.full([1, {run.block}], True, tl.int1)"
                else:
                    text = f"{index} < {self._limit(run.width)}"
                valid = self._line("ok", text)
            else:
                p = self._line("a", p)
                index = self._line(
                    "c", f"{start} + {p} // {run.padded} * {run.size} + {p} % {run.padded}"
                )
                valid = self._line(
                    "ok",
                    f"({p} % {run.padded} < {run.size}) & ({index} < {self._limit(run.width)})",
                )
            self._made[key] = Columns(key, index, valid, run.block, run.width, run)
        return self._made[key]

    def divided(self, at: Columns, size: int) -> tuple[str, str]:
        """Variables with index // size and index % size."""
        key: Key = ("divided", at.key, size)
        if key not in self._divided:
            whole, rest = f"{at.index} // {size}", f"{at.index} % {size}"
            if self.inside and at.run == Run(at.width, 1, size, size):
                whole = f"tl.full([1, {size}], ({self._start(at.width)}) // {size}, tl.int32)"
                rest = f"tl.arange(0, {size})[None, :]"
            self._divided[key] = self._line("div", whole), self._line("mod", rest)
        return self._divided[key]

    # ---- pairs
    def member(self, q: Columns, pairs: str, k: int) -> Columns:
        """Columns of member k of the pairs q."""
        key: Key = ("member", q.key, pairs, k)
        if key not in self._made:
            layout, head = parse_pairs(pairs)
            if layout == "adjacent":
                index = f"2 * {q.index} + {k}"
            elif head:
                h = head // 2
                block, rest = self.divided(q, h)
                index = f"{block} * {head} + {rest}" + f" + {h}" * k
            else:
                index = q.index + f" + {self._total(q.width)}" * k
            name = self._line("c", index)
            self._made[key] = Columns(
                key, name, q.valid, q.block, 2 * q.width, member=(q, pairs, k)
            )
        return self._made[key]

    def doubled(self, q: Columns) -> Columns | None:
        """Both members of the adjacent pairs q, side by side; None if q is no run."""
        if q.run is None:
            return None
        r = q.run
        return self.run(Run.of(2 * r.width, r.count, 2 * r.size))

    def halved(self, at: Columns) -> Columns | None:
        """Numbers of the adjacent pairs that ``at`` consists of; None if it is no whole pairs."""
        r = at.run
        if r is None or r.size % 2:
            return None
        return self.run(Run.of(r.width / 2, r.count, r.size // 2))

    def pair_of(self, at: Columns, pairs: str) -> tuple[Columns, str]:
        """Number of the pair that each column belongs to, and the condition 'second member'."""
        layout, head = parse_pairs(pairs)
        if layout == "adjacent":
            index, second = f"{at.index} // 2", f"{at.index} % 2 == 1"
        elif head:
            h = head // 2
            block, rest = self.divided(at, head)
            index, second = f"{block} * {h} + {rest} % {h}", f"{rest} >= {h}"
        else:
            half = self._total(at.width / 2)
            index, second = f"{at.index} % {half}", f"{at.index} >= {half}"
        return self._derived("pair", at, pairs, index, at.width / 2), self._line("second", second)

    # ---- groups
    def groups(self, at: Columns, size: int) -> tuple[Columns, int]:
        """Groups of ``size`` columns: (columns of the groups, columns each has here).

        The second is 0 where the groups do not lie side by side in the block; then the first has
        one entry per column.
        """
        r = at.run
        if r is not None and r.contiguous and r.size % size == 0 and size == power_of_two(size):
            return self.run(Run.of(r.width / size, 1, r.size // size)), size
        if r is not None and not r.contiguous and r.size == size:
            return self.run(Run.of(r.width / size, r.count, 1)), r.padded
        if at.within is not None and size % at.within[1] == 0:
            return self.groups(at.within[0], size)
        if at.member is not None and at.member[1] == f"halves:{size}":
            return self.groups(at.member[0], size // 2)
        index = f"{at.index} // {size}"
        return self._derived("group", at, size, index, at.width / size), 0

    def spread(self, groups: Columns, size: int) -> tuple[Columns, int]:
        """The columns of these groups of ``size``, group by group, and the padded size of each."""
        padded = power_of_two(size)
        if groups.run is not None and groups.run.contiguous:
            run = Run.of(groups.run.width * size, groups.run.block, size)
            return self.run(run), padded
        key: Key = ("spread", groups.key, size)
        if key not in self._made:
            block = groups.block * padded
            lane = f"tl.arange(0, {padded})[None, None, :]"
            index = self._line(
                "c",
                f"tl.reshape({groups.index}[:, :, None] * {size} + {lane}, [1, {block}])",
            )
            valid = self._line(
                "ok", f"tl.reshape({groups.valid}[:, :, None] & ({lane} < {size}), [1, {block}])"
            )
            self._made[key] = Columns(key, index, valid, block, groups.width * size)
        return self._made[key], padded

    # ---- rotations
    def partner(self, at: Columns, index: str, attrs: Key, head: int) -> Columns:
        """The other member of each column's pair, both in one head."""
        made = self._derived("partner", at, attrs, index, at.width)
        return Columns(made.key, made.index, made.valid, made.block, made.width, within=(at, head))

    def _derived(self, what: str, at: Columns, extra: Any, index: str, width: Fraction) -> Columns:
        key: Key = (what, at.key, extra)
        if key not in self._made:
            name = self._line("c", index)
            self._made[key] = Columns(key, name, at.valid, at.block, width)
        return self._made[key]
