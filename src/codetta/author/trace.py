"""What happened between a model and the tools, on disk: one JSON object a line, only ever appended.

A trace is a folder: ``trace.jsonl``, ``rounds/NNN.py`` with the code of each round, ``best.py`` and
``summary.json``. Each line names the hash of the line before it, so that an edited trace is seen to
be one; a last line that a crash cut short is left out. docs/agents.md lists the fields.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from codetta.errors import TraceUnusable

FORMAT = 1
Event = dict[str, Any]


class Trace:
    """A folder, and the events in it.

    Attributes:
        folder: of the trace.
        events: all lines, oldest first; the first is the "start".
    """

    def __init__(self, folder: Path, events: list[Event], last: str) -> None:
        self.folder, self.events, self._last = folder, events, last

    @classmethod
    def create(cls, folder: str | Path, start: Mapping[str, Any]) -> Trace:
        """A new one.

        Raises:
            TraceUnusable: there is one already, or the folder cannot be written.
        """
        folder = Path(folder)
        file = folder / "trace.jsonl"
        if file.exists():
            fix = f"Go on with it (--resume {folder}), or give another folder."
            raise TraceUnusable(path=file, reason="exists", fix=fix)
        trace = cls(folder, [], "")
        try:
            (folder / "rounds").mkdir(parents=True, exist_ok=True)
            trace.add("start", format=FORMAT, **start)
        except OSError as error:
            fix = "Give a folder that can be written."
            reason = f"cannot be written ({error.strerror})"
            raise TraceUnusable(path=folder, reason=reason, fix=fix) from error
        return trace

    @classmethod
    def resume(cls, folder: str | Path) -> Trace:
        """One that is there, to go on with.

        Raises:
            TraceUnusable: there is none, a line is broken or was edited, or its format is another.
        """
        folder = Path(folder)
        file = folder / "trace.jsonl"
        try:
            data = file.read_bytes()
        except OSError as error:
            fix = "Give the folder of a trace, or start a new one with --out."
            reason = f"cannot be read ({error.strerror})"
            raise TraceUnusable(path=file, reason=reason, fix=fix) from error
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:  # what a crash cut short was never answered for
            os.truncate(file, len(whole))
        events, last = _read(file, whole)
        return cls(folder, events, last)

    def add(self, kind: str, **fields: Any) -> Event:
        """Append an event, on disk before this returns."""
        event: Event = {"kind": kind, "at": _now(), "previous_sha256": self._last, **fields}
        line = json.dumps(event, ensure_ascii=False, allow_nan=False).encode()
        with (self.folder / "trace.jsonl").open("ab") as file:
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._last = hashlib.sha256(line).hexdigest()
        self.events.append(event)
        return event

    def of(self, kind: str) -> list[Event]:
        return [e for e in self.events if e["kind"] == kind]

    @property
    def start(self) -> Event:
        return self.events[0]

    def code(self, number: int) -> Path:
        """The file of a round's code."""
        return self.folder / "rounds" / f"{number:03}.py"

    def write(self, name: str, text: str) -> Path:
        """A file beside the trace, replaced as a whole."""
        file = self.folder / name
        draft = file.with_name(f".{file.name}.new")
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)
        return file


def _read(file: Path, data: bytes) -> tuple[list[Event], str]:
    events: list[Event] = []
    last = ""
    fix = "Start a new trace; this one is no longer what was written."
    for number, line in enumerate(data.splitlines(), 1):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
            raise TraceUnusable(path=file, reason=f"has no event in line {number}", fix=fix)
        if event.get("previous_sha256") != last:
            reason = f"was edited: line {number} does not follow the one before it"
            raise TraceUnusable(path=file, reason=reason, fix=fix)
        last = hashlib.sha256(line).hexdigest()
        events.append(event)
    if not events or events[0]["kind"] != "start" or events[0].get("format") != FORMAT:
        raise TraceUnusable(path=file, reason="is no trace of this format", fix=fix)
    return events, last


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
