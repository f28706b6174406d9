"""One row per kernel: the common currency of cost tables, traces and Plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

GEMM = "gemm"
MEMORY = "memory"
ATTENTION = "attention"
KINDS = (GEMM, MEMORY, ATTENTION)

# Regions of a step.
LAYERS = "layers"  # the decoder layers
PROGRAMS = "programs"  # what codetta's operators run in a compiled model


class CostRow(Protocol):
    """What a row must say, whoever wrote it (a Plan's cost table has rows of its own class)."""

    @property
    def kind(self) -> str: ...  # one of KINDS
    @property
    def name(self) -> str: ...
    @property
    def bytes(self) -> int: ...  # moved by ONE launch: inputs read + outputs written
    @property
    def count(self) -> int: ...  # launches in one forward + backward


@dataclass(frozen=True)
class KernelRow:
    """`count` launches of one kernel, each moving `bytes` bytes."""

    kind: str
    name: str  # the aten operation, e.g. "mul"
    bytes: int
    count: int = 1
    where: str = ""  # the part of the layer it belongs to, for people


@dataclass(frozen=True)
class Sum:
    kernels: int = 0
    bytes: int = 0


def sums(rows: Iterable[CostRow]) -> dict[str, Sum]:
    """{kind: Sum} over all launches; every kind is present."""
    total = {kind: Sum() for kind in KINDS}
    for row in rows:
        old = total[row.kind]
        total[row.kind] = Sum(old.kernels + row.count, old.bytes + row.count * row.bytes)
    return total


def launches(rows: Iterable[CostRow]) -> Counter[tuple[str, str, int]]:
    """The multiset of (kind, name, bytes): two tables are the same table when these are equal."""
    found: Counter[tuple[str, str, int]] = Counter()
    for row in rows:
        found[row.kind, row.name, row.bytes] += row.count
    return found
