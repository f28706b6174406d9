"""Numbers as people read them."""

from __future__ import annotations


def amount(value: float) -> str:
    """Bytes in powers of 1000, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def duration(seconds: float) -> str:
    """Seconds in the unit that gives them one to three digits before the point."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def times(before: float, after: float) -> str:
    """How many times less."""
    return f"{before / after:.3g}×" if after else "–"
