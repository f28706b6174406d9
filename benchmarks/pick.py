"""The fastest of a few variants of one kernel, found at its first call on each shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from measure import synchronize, timed
from torch import Tensor

CALLS = 3  # in a row, per sample
SAMPLES = 3


class Picked:
    """Callable like each of its variants; one that fails at a shape is not taken there.

    Attributes:
        notes: what was chosen or failed, for the record.
    """

    def __init__(self, name: str, variants: dict[str, Callable[..., Any]]) -> None:
        self.name, self.variants = name, variants
        self.chosen: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self.notes: list[str] = []

    def __call__(self, a: Tensor, b: Tensor, *rest: Any, **named: Any) -> Any:
        key = tuple(a.shape), tuple(b.shape)
        if key not in self.chosen:
            self.chosen[key] = self._pick(lambda f: f(a, b, *rest, **named), key)
        return self.chosen[key](a, b, *rest, **named)

    def _pick(
        self, call: Callable[[Callable[..., Any]], Any], key: tuple[Any, ...]
    ) -> Callable[..., Any]:
        times: dict[str, float] = {}
        errors: Sequence[str] = []
        for name, variant in self.variants.items():
            try:
                call(variant)  # compiles
                synchronize()
                times[name] = min(timed(lambda v=variant: call(v), CALLS) for _ in range(SAMPLES))
            except Exception as error:
                errors = [*errors, f"{name}: {type(error).__name__}: {str(error)[:120]}"]
        if not times:
            raise RuntimeError(f"no variant of {self.name} runs at {key}: {'; '.join(errors)}")
        best = min(times, key=lambda name: times[name])
        self.notes += [f"{self.name} {key}: {best} of {times}", *errors]
        return self.variants[best]
