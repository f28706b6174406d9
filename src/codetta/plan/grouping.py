"""Grouping: from placed nodes to kernels, each with the values it writes.

* Every contraction is a GEMM kernel, its epilogue what was placed there.
* Stored matrices and reductions without an epilogue: what reads only matrices that some epilogue
  loads anyway rides along with it (SwiGLU's recomputed output, for its weight gradient); the rest
  becomes pointwise kernels, one for all that read a matrix in common.
* Vectors: one finalizer per axis and set of kernels whose partials it needs. A reduction that is
  read as a vector (by an epilogue, an output or a view) is completed by a finalizer, too.
* What depends on parameters only is weight preparation (folds, packs): one kernel per result.

Two kernels become one only if neither is downstream of the other, so their graph has no cycles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from codetta.plan.operations import OPERATIONS
from codetta.plan.placement import Placement

GEMM, POINTWISE, FINALIZE, PREPARE, MOVE, VIEW, OPAQUE_KIND = (
    "gemm", "pointwise", "finalize", "prepare", "move", "view", "opaque",
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """What one kernel computes: its kind, root, and the values it must produce."""

    kind: str
    root: int
    members: tuple[int, ...]


@dataclass(eq=False)
class _Unit:
    """A kernel in the making. References: a node's number, or ``~number`` for raw partials."""

    kind: str
    members: list[int]
    reads: set[int]
    gemm: int | None = None
    loads: frozenset[int] = frozenset()

    @property
    def group(self) -> Group:
        root = max(self.members) if self.gemm is None else self.gemm
        return Group(self.kind, root, tuple(sorted(self.members)))


def groups(placement: Placement) -> list[Group]:
    """All kernels of a placement."""
    return _Grouping(placement).result()


class _Grouping:
    def __init__(self, placement: Placement) -> None:
        self.placement, self.nodes = placement, placement.nodes
        self.units: list[_Unit] = []
        self.writer: dict[int, _Unit] = {}

    def result(self) -> list[Group]:
        gemms, leftovers, finalizers = self._gemms(), self._leftovers(), self._finalizers()
        self._others()
        self._join_leftovers(gemms, leftovers)
        self._join_finalizers(finalizers)
        return [unit.group for unit in self.units]

    # ---- one unit each
    def _add(self, kind: str, members: list[int], reads: Iterable[int], **extra: object) -> _Unit:
        unit = _Unit(kind, members, set(reads), **extra)  # type: ignore[arg-type]
        self.units.append(unit)
        tiles = kind in (GEMM, POINTWISE)
        for i in members:
            self.writer[~i if tiles and self.placement.is_reduction(i) else i] = unit
        return unit

    def _gemms(self) -> list[_Unit]:
        place = self.placement
        inside: dict[int, list[int]] = {i: [] for i in range(len(self.nodes)) if place.is_gemm(i)}
        for i, gemm in place.host.items():
            inside[gemm].append(i)
        found = []
        for gemm, nodes in inside.items():
            reads = set(self.nodes[gemm].args)
            for i in nodes:
                if i != gemm:
                    reads |= place.externals(i, gemm)
            matrices = (place.matrices(i, gemm) for i in nodes if i != gemm)
            members = [i for i in nodes if i in place.stored]
            loads = frozenset().union(*matrices)
            found.append(self._add(GEMM, members, reads, gemm=gemm, loads=loads))
        return found

    def _stored(self) -> Iterator[int]:
        return iter(sorted(self.placement.stored))

    def _leftovers(self) -> list[_Unit]:
        place = self.placement
        return [
            self._add(POINTWISE, [i], place.externals(i, None), loads=place.matrices(i, None))
            for i in self._stored()
            if place.joins_epilogues(i) and i not in place.host
        ]

    def _finalizers(self) -> list[_Unit]:
        place, found = self.placement, []
        for i in self._stored():
            if place.is_vector(i):
                known = place.vector_reads(i, place.stored)
                reads = {~r if place.is_reduction(r) else r for r in known}
                found.append(self._add(FINALIZE, [i], reads))
            elif place.is_reduction(i) and place.completed(i):
                found.append(self._add(FINALIZE, [i], [~i]))
        return found

    def _others(self) -> None:
        place = self.placement
        for i in self._stored():
            if place.is_prepared(i):
                at_hand = all(a in place.stored or place.is_leaf(a) for a in self.nodes[i].args)
                kind = VIEW if place.is_view(i) and at_hand else PREPARE
                self._add(kind, [i], place.prepared_reads(i, place.stored))
            elif self.nodes[i].op in OPERATIONS and not place.is_gemm(i):
                opaque = self.nodes[i].op.startswith("opaque")
                kind = VIEW if place.is_view(i) else OPAQUE_KIND if opaque else MOVE
                self._add(kind, [i], self.nodes[i].args)

    # ---- joining
    def _join_leftovers(self, gemms: list[_Unit], leftovers: list[_Unit]) -> None:
        joined: list[_Unit] = []
        for unit in leftovers:
            (i,) = unit.members
            into = next((g for g in gemms if self._rides(i, unit, g)), None) or next(
                (k for k in joined if self._shares(unit, k)), None
            )
            if into is None:
                joined.append(unit)
            else:
                self._merge(unit, into)

    def _rides(self, i: int, unit: _Unit, gemm: _Unit) -> bool:
        assert gemm.gemm is not None
        return (
            bool(unit.loads)
            and unit.loads <= gemm.loads
            and self.placement.fits(i, gemm.gemm)
            and self._independent(unit, gemm)
        )

    def _shares(self, unit: _Unit, other: _Unit) -> bool:
        rows = {self.placement.domain(i).rows for i in (*unit.members, *other.members)}
        pairs = ((i, j) for i in unit.members for j in other.members)
        refused = any(p in self.placement.refused for p in pairs)
        alike = bool(unit.loads & other.loads) and len(rows) == 1 and not refused
        return alike and self._independent(unit, other)

    def _join_finalizers(self, finalizers: list[_Unit]) -> None:
        by_source: dict[object, list[_Unit]] = {}
        for unit in finalizers:
            alike = by_source.setdefault((self._axis(unit), self._sources(unit)), [])
            into = next((k for k in alike if self._follows(unit, k)), None)
            if into is None:
                alike.append(unit)
            else:
                self._merge(unit, into)

    def _axis(self, unit: _Unit) -> tuple[object, ...]:
        type_ = self.placement.axis(unit.members[0])
        return unit.kind, type_.kind, type_.rows, type_.cols

    def _sources(self, unit: _Unit) -> frozenset[int]:
        """Kernels whose results a finalizer needs, seen through finalizers of the same axis."""
        found: set[int] = set()
        for r in unit.reads:
            writer = self.writer.get(r)
            if writer is not None and writer is not unit:
                same = self._axis(writer) == self._axis(unit)
                found |= self._sources(writer) if same else {id(writer)}
        return frozenset(found)

    def _follows(self, unit: _Unit, other: _Unit) -> bool:
        """The finalizers can be one: what ``unit`` reads of ``other`` is computed on the way."""
        others = {r for r in unit.reads if self.writer.get(r) not in (None, other)}
        rest = _Unit(unit.kind, unit.members, others)
        return not self._needs(rest, other) and not self._needs(other, unit)

    def _merge(self, unit: _Unit, into: _Unit) -> None:
        into.members += unit.members
        into.reads |= unit.reads
        into.loads |= unit.loads
        for ref, writer in self.writer.items():
            if writer is unit:
                self.writer[ref] = into
        into.reads -= {r for r in into.reads if self.writer.get(r) is into}
        self.units.remove(unit)

    def _independent(self, a: _Unit, b: _Unit) -> bool:
        return not self._needs(a, b) and not self._needs(b, a)

    def _needs(self, unit: _Unit, other: _Unit) -> bool:
        """``unit`` runs after ``other``, directly or through other kernels."""
        seen: set[int] = set()
        stack = [unit]
        while stack:
            for r in stack.pop().reads:
                writer = self.writer.get(r)
                if writer is other:
                    return True
                if writer is not None and id(writer) not in seen:
                    seen.add(id(writer))
                    stack.append(writer)
        return False
