"""Whether what judges is still what it was: the harness and the tasks, as files."""

from __future__ import annotations

import hashlib
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
_JUDGING = (
    "calls", "cases", "checks", "contract", "draws", "integrity", "judge", "layouts", "oracle",
    "power", "sandbox", "special", "task", "verify",
)  # fmt: skip


def fingerprint() -> str:
    """Hash of the files that decide on right and wrong."""
    total = hashlib.sha256()
    for path in [*(_FOLDER / f"{x}.py" for x in _JUDGING), *sorted(_FOLDER.glob("tasks/*.py"))]:
        total.update(path.name.encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
