"""What is known about one kernel, by counters or without: what a diagnosis is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SMS = 132  # multiprocessors of H100 and H200 (SXM)


@dataclass(frozen=True)
class Facts:
    """What is known about a kernel; None is unknown.

    Attributes:
        counters: of the fused kernel by the short names of :data:`.counters.METRICS`, and
            ``plain``: of its plain product.
        bytes_by_name: moved per operand and output, by the cost model, a and b left out;
            ``plain_bytes`` what the product alone moves.
        tiles: of the output, per launch.
        split: why the program is not one kernel, or "".
        registers: values alive at once per accumulator element, at most.
        flops, special: plain and special operations per accumulator element.
        product_ops: 2 K, operations of the product per accumulator element.
        expected: time over the plain product's by the cost model; 0 is unknown.
    """

    counters: Mapping[str, Any] = field(default_factory=dict)
    plain: Mapping[str, Any] = field(default_factory=dict)
    bytes_by_name: Mapping[str, int] = field(default_factory=dict)
    plain_bytes: int = 0
    tiles: int = 0
    split: str = ""
    config: str = ""
    stages: int | None = None
    spills: int | None = None
    registers: float = 0.0
    flops: float = 0.0
    special: float = 0.0
    product_ops: float = 0.0
    expected: float = 0.0

    def get(self, name: str) -> float:
        return float(self.counters.get(name, 0.0))

    def of_plain(self, name: str) -> float:
        return float(self.plain.get(name, 0.0))

    @property
    def slower(self) -> float:
        """Time over that of the plain product; 0 where either is unknown."""
        plain = self.of_plain("time us")
        return self.get("time us") / plain if plain else 0.0

    @property
    def model_bytes(self) -> int:
        return self.plain_bytes + sum(self.bytes_by_name.values())

    @property
    def measured_bytes(self) -> float:
        return self.get("DRAM read bytes") + self.get("DRAM written bytes")

    @property
    def filled(self) -> float:
        """Share of the last wave's multiprocessors, and all others', that have a tile."""
        waves = -(-self.tiles // SMS)
        return self.tiles / (waves * SMS) if waves else 1.0

    @property
    def spilled(self) -> int:
        return int(self.spills or 0) or int(self.get("local stores"))

    def stall(self, *reasons: str) -> float:
        """Share of the waiting that has one of these reasons."""
        stalls: Mapping[str, float] = self.counters.get("stalls", {})
        total = sum(stalls.values())
        return sum(x for n, x in stalls.items() if n in reasons) / total if total else 0.0

    def heaviest(self) -> str:
        """The operand or output that moves most bytes, with its share of what is extra."""
        if not self.bytes_by_name:
            return "a and b carry the bytes"
        name = max(self.bytes_by_name, key=lambda n: self.bytes_by_name[n])
        share = self.bytes_by_name[name] / sum(self.bytes_by_name.values())
        size = self.bytes_by_name[name] / 2**20
        return f"{name} carries most: {size:.0f} MiB, {share:.0%} of what the epilogue moves"
