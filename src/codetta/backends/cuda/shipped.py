"""Configurations that come with the package: measured on one H200, kept as data with provenance.

The file holds one entry per family of epilogues, layout and shape that was measured. A kernel gets
the entry of its family and layout that is nearest to it in log M, log N and log K, unless even that
one is far away: what was measured at thousands of rows says nothing about one row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from codetta.backends.cuda.configs import Configuration

FILE = Path(__file__).with_name("shipped_h200.json")
_FORMAT = 1
_KEY = ("family", "layout", "m", "n", "k")  # what tells entries apart
_FAR = {"m": 3.0, "n": 3.5, "k": 3.5}  # in factors of two


def lookup(family: str, m: int, n: int, k: int, layout: str) -> Configuration | None:
    """The entry for a family of epilogues and a shape, or None where nothing near was measured."""
    given = {"m": m, "n": n, "k": k}
    nearest, chosen = math.inf, None
    for entry, config in _entries().get((family, layout), ()):
        apart = {x: abs(math.log2(max(given[x], 1) / entry[x])) for x in given}
        total = sum(apart.values())
        if total < nearest and all(apart[x] <= _FAR[x] for x in given):
            nearest, chosen = total, config
    return chosen


@lru_cache(maxsize=1)
def _entries() -> Mapping[tuple[str, str], list[tuple[dict[str, Any], Configuration]]]:
    found: dict[tuple[str, str], list[tuple[dict[str, Any], Configuration]]] = {}
    data = json.loads(FILE.read_text())
    assert data["format"] == _FORMAT, data["format"]
    for entry in data["entries"]:
        source = f"{data['provenance']['gpu']}, {entry['date']}, {entry['ms']} ms"
        config = Configuration.of(entry["config"], source)
        assert config is not None, entry
        found.setdefault((entry["family"], entry["layout"]), []).append((entry, config))
    return found


def dumps(records: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """Text of the data file, from (environment, kernel) records of a sweep; the fastest counts."""
    entries: dict[tuple[Any, ...], dict[str, Any]] = {}
    provenance: dict[str, Any] = {}
    for environment, kernel in records:
        provenance = provenance or {k: v for k, v in environment.items() if k != "date"}
        entry = _entry(environment, kernel)
        key = _key(entry)
        if key not in entries or entry["ms"] < entries[key]["ms"]:
            entries[key] = entry
    return _text(provenance, entries)


def merged(text: str, records: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """Text of the data file with these records in place of its entries of the same kernels.

    Two records of one kernel do not differ in how they were measured, so the fastest counts.
    """
    data = json.loads(text)
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for environment, kernel in records:
        entry = _entry(environment, kernel)
        key = _key(entry)
        if key not in found or entry["ms"] < found[key]["ms"]:
            found[key] = entry
    return _text(data["provenance"], {_key(e): e for e in data["entries"]} | found)


def _entry(environment: Mapping[str, Any], kernel: Mapping[str, Any]) -> dict[str, Any]:
    best = kernel["best"]
    return {x: kernel[x] for x in _KEY} | {
        "config": best["config"], "ms": best["median_ms"], "stages": best["stages"],
        "spills": best["spills"], "cublas_ms": kernel["cublas_ms"],
        "ratio_to_plain": kernel["ratio_to_plain"], "date": environment["date"],
    }  # fmt: skip


def _key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[x] for x in _KEY)


def _text(provenance: Mapping[str, Any], entries: Mapping[tuple[Any, ...], Any]) -> str:
    lines = ",\n".join("  " + json.dumps(entries[key]) for key in sorted(entries))
    head = json.dumps({"format": _FORMAT, "provenance": provenance}, indent=1)
    return head.rstrip("}\n ") + "},\n" + f' "entries": [\n{lines}\n ]\n}}\n'
