"""Verified programs, kept: an append-only file with one JSON record a line.

``codetta promote`` appends; ``codetta bench`` and :func:`codetta.programs.recorded` read. Two files
count: the one that comes with the package, which nothing writes, and the user's, which
``CODETTA_REGISTRY`` names (by default ``registry.jsonl`` beside the tuned configurations). A line
is written under a lock by one write, so any number of processes may append and read at once.

A line is believed only if it is whole: its checksum, the hash of its program's text, and that text
itself, which must parse to a program that prints alike. A record answers for the task as it was
promised when it was made; if the task has changed since, the record is silent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from codetta.author.task import Task
from codetta.backends.cuda import config_cache
from codetta.errors import CodettaError, RegistryNotWritable
from codetta.language.program import Program

VARIABLE = "CODETTA_REGISTRY"
SHIPPED = Path(__file__).with_name("recorded.jsonl")
_FORMAT = 1


@dataclass(frozen=True)
class Timing:
    """One workload's time, or its estimate where ``gpu`` is "".

    Attributes:
        ms: of the program; plain_ms: of a @ b alone, in the same run.
    """

    m: int
    n: int
    k: int
    dtype: str
    gpu: str
    ms: float
    plain_ms: float

    @property
    def ratio(self) -> float:
        return self.ms / self.plain_ms


@dataclass(frozen=True)
class Record:
    """One promotion.

    Attributes:
        task: name, and ``task_sha256`` what it promised (:func:`promise`).
        source_sha256: of the author's file.
        text: the program, in canonical form; ``program_sha256`` its hash.
        errors: tensor -> (error, budget), Frobenius norms, the worst of the verification.
        timings: measured, or estimated.
        environment: versions, GPU, Python.
        seed: of the verification; date: UTC, ISO.
    """

    task: str
    task_sha256: str
    source_sha256: str
    program_sha256: str
    text: str
    errors: Mapping[str, tuple[float, float]]
    timings: tuple[Timing, ...]
    environment: Mapping[str, str]
    seed: int
    date: str
    format: int = field(default=_FORMAT)

    @cached_property
    def program(self) -> Program:
        return Program.parse(self.text)

    def data(self) -> dict[str, Any]:
        """As plain data, as it is written."""
        return asdict(self)

    @staticmethod
    def of(data: Mapping[str, Any]) -> Record:
        """The record of plain data; ValueError, TypeError or KeyError if it is none."""
        if data.get("format") != _FORMAT:
            raise ValueError("another format")
        given = dict(data)
        given["timings"] = tuple(Timing(**t) for t in data["timings"])
        given["errors"] = {n: (float(e), float(b)) for n, (e, b) in data["errors"].items()}
        record = Record(**given)
        if not all(t.ms > 0 and t.plain_ms > 0 for t in record.timings):
            raise ValueError("a time that is none")
        if hashlib.sha256(record.text.encode()).hexdigest() != record.program_sha256:
            raise ValueError("the program's hash is another's")
        if str(record.program) != record.text:
            raise ValueError("the program's text is not canonical")
        return record


def promise(task: Task) -> str:
    """Hash of what a program for the task must be: formula, constants, operands and outputs."""
    operands = [(o.name, o.kind, str(o.width), o.dtype) for o in task.operands]
    outputs = [(o.name, o.kind, str(o.width), o.dtype) for o in task.outputs]
    constants = sorted(task.constants.items())
    text = json.dumps([task.name, task.formula, constants, operands, outputs])
    return hashlib.sha256(text.encode()).hexdigest()


# ------------------------------------------------------------------------------------- the file
def user_file() -> Path | None:
    """The file that promotions go to; None without a home directory."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    folder = config_cache.folder()
    return None if folder is None else folder.parent / "registry.jsonl"


def append(record: Record) -> Path:
    """Write a record at the end of the user's file.

    Raises:
        RegistryNotWritable: with the reason; nothing is half written.
    """
    file = user_file()
    if file is None:
        raise RegistryNotWritable(file="the registry", reason="there is no home directory")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _append(file, _line(record.data()))
    except OSError as error:
        raise RegistryNotWritable(file=str(file), reason=str(error)) from error
    return file


def _line(data: Mapping[str, Any]) -> bytes:
    text = json.dumps(data, sort_keys=True)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"sha256": checksum, "record": data}, sort_keys=True).encode() + b"\n"


def _append(file: Path, line: bytes) -> None:
    import fcntl

    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # released when the descriptor is closed
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":  # what a crash left
            line = b"\n" + line
        written = os.write(descriptor, line)
        if written != len(line):
            os.ftruncate(descriptor, size)
            raise OSError("there is no space left")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def records() -> tuple[Record, ...]:
    """All records, those of the package first, then the user's, oldest first."""
    found: list[Record] = []
    for file in (SHIPPED, user_file()):
        with contextlib.suppress(OSError):
            if file is not None:
                state = file.stat()
                found += _read(file, state.st_mtime_ns, state.st_size)
    return tuple(found)


@lru_cache(maxsize=4)
def _read(file: Path, changed: int, size: int) -> tuple[Record, ...]:
    found, broken = [], 0
    for line in file.read_bytes().splitlines():
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            text = json.dumps(data["record"], sort_keys=True)
            if hashlib.sha256(text.encode()).hexdigest() != data["sha256"]:
                raise ValueError("the checksum is another's")
            found.append(Record.of(data["record"]))
        except (ValueError, TypeError, KeyError, AttributeError, CodettaError):
            broken += 1
    if broken:
        _warn(file, broken)
    return tuple(found)


@lru_cache(maxsize=16)
def _warn(file: Path, broken: int) -> None:
    lines = "1 line" if broken == 1 else f"{broken} lines"
    warnings.warn(f"{lines} of {file} cannot be trusted and are ignored", stacklevel=4)
