"""What became of weights that are read side by side, as data and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from codetta.plan.sides import Sides


@dataclass(frozen=True)
class Packed:
    """Weights that a graph reads side by side.

    Attributes:
        names: paths of the parameters in the model, in the order of their rows; names of the Plan's
            inputs where they are none.
        reason: why they are not views of one storage; '' where they are.
        sides: their rows under the names of the Plan; None where they are computed from others.
        call: name of the region.
    """

    names: tuple[str, ...]
    reason: str
    sides: Sides | None
    call: str

    @property
    def rows(self) -> tuple[tuple[str, int, int], ...]:
        """(path, number of its first row in the whole, step from row to row) of each weight."""
        members = self.sides.members if self.sides is not None else ()
        named = zip(self.names, members, strict=False)
        return tuple((name, m.first, m.step) for name, m in named)

    @property
    def alternating(self) -> bool:
        """Rows of several weights in turn, not one weight's after the other's."""
        return any(step > 1 for _, _, step in self.rows)


def notes(packs: Iterable[Packed]) -> list[str]:
    """What was packed and what not, equal layers together."""
    each: dict[tuple[str, ...], Packed] = {}
    for p in packs:  # in several regions or graphs: packed for one is packed
        if p.names not in each or not p.reason:
            each[p.names] = p
    if not each:
        return ["pack=True: nothing to do, no two weights are read side by side."]
    found: Counter[str] = Counter()
    for p in each.values():
        names = ", ".join(".".join(path.split(".")[-2:]) for path in p.names)
        turns = " (rows in turn)" if p.alternating and not p.reason else ""
        found[
            f"packed: {names}{turns}" if not p.reason else f"not packed: {names}: {p.reason}"
        ] += 1
    return [text if count == 1 else f"{count} times {text}" for text, count in found.items()]
