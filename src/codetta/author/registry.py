"""Which program is best for a task, and how one becomes a candidate for that: by promotion.

Only what has just been verified is promoted, from exactly the source that was verified; it is timed
on the way, or its time is estimated where there is no GPU, and appended to :mod:`.records`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from codetta.author.records import Record, Timing, promise, records
from codetta.author.task import Task, Workload, find, names
from codetta.errors import NothingRecorded, NotPromoted
from codetta.language.program import Program

if TYPE_CHECKING:
    from codetta.programs.catalog import Entry


def best(
    task: Task,
    workload: Workload | None = None,
    *,
    dtype: str | None = None,
    gpu: str | None = None,
) -> Record | None:
    """The best record of a task, or None.

    Measured ones go before estimated ones. Among each the least time over the plain product's
    counts, at the recorded workload nearest to the one asked for; without one, their geometric
    mean. The newer of two equals wins.

    Args:
        dtype: of a and b; records without a time in it do not count.
        gpu: whose times count as measured; any by default.
    """
    wanted = promise(task)
    if dtype is None and workload is not None:
        dtype = workload.dtype
    ranked = [
        (score, age, record)
        for age, record in enumerate(reversed(records()))
        if record.task == task.name and record.task_sha256 == wanted
        for score in _scores(record, workload, dtype, gpu)
    ]
    return min(ranked, key=lambda r: (r[0], r[1]))[2] if ranked else None


def _scores(
    record: Record, workload: Workload | None, dtype: str | None, gpu: str | None
) -> Iterator[tuple[bool, float]]:
    """(estimated, ratio to the plain product), at most one."""
    fitting = [t for t in record.timings if dtype in (None, t.dtype)]
    measured = [t for t in fitting if t.gpu and gpu in (None, t.gpu)]
    counted = measured or fitting
    if workload is not None and counted:
        counted = [min(counted, key=lambda t: _apart(t, workload))]
    if counted:
        logs = [math.log(t.ratio) for t in counted]
        yield not measured, math.exp(sum(logs) / len(logs))


def _apart(t: Timing, w: Workload) -> float:
    pairs: Sequence[tuple[int, int]] = ((t.m, w.m), (t.n, w.n), (t.k, w.k))
    return sum(abs(math.log2(x / max(y, 1))) for x, y in pairs)


def recorded(
    task: str,
    *,
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    dtype: str | None = None,
) -> Program:
    """The best verified program that has been promoted for a task.

        codetta.gemm(a, w.t(), codetta.programs.recorded("bias_gelu_mask"), bias=b, keep=k)

    Args:
        task: its name, or the path of a task file.
        m, n, k: sizes of the call; all or none. The record that is best near them is taken.
        dtype: of a and b, as PyTorch names it.

    Raises:
        UnknownTask: there is no such task.
        NothingRecorded: nobody has promoted a program for it.
    """
    asked = find(task)
    sizes = None if None in (m, n, k) else Workload(m or 0, n or 0, k or 0, dtype or "bfloat16")
    found = best(asked, sizes, dtype=dtype)
    if found is None:
        known = sorted({r.task for r in records()})
        raise NothingRecorded(
            task=task, dtype=f" in {dtype}" if dtype else "", known=", ".join(known) or "nothing"
        )
    return found.program


def entries() -> list[Entry]:
    """The best recorded program of each task, as ``codetta programs`` lists it."""
    from codetta.programs.catalog import Entry

    found = []
    for name in sorted({r.task for r in records()} & set(names())):
        task = find(name)
        record = best(task)
        if record is not None:
            first = " ".join(task.formula.splitlines()[0].split())
            found.append(
                Entry(f'recorded("{name}")', "recorded", first, task.title, record.program,
                      MappingProxyType({}), _told(record))
            )  # fmt: skip
    return found


def _told(record: Record) -> str:
    """When a record was made, and its time over the plain product's."""
    times = [f"{t.m} x {t.n} x {t.k} {t.dtype}: {t.ratio:.3f} x a @ b"
             f"{f' on {t.gpu}' if t.gpu else ', estimated'}" for t in record.timings]  # fmt: skip
    return "; ".join([f"promoted {record.date[:10]}", *times])


def promote_candidate(
    path: str | Path, task: str | Task | None = None, *, seed: int | None = None
) -> Record:
    """Verify a candidate in full and append it to the registry.

    Raises:
        NotPromoted: it failed, and which stage failed why; ``error.fields["report"]`` is the whole
            report. Also where the registry cannot be written.
        NoCandidateFile, UnknownTask: there is nothing to promote.
    """
    from codetta.author.promotion import promotion

    report, record = promotion(path, task, seed=seed)
    if record is None:
        stage = next(s for s in report.stages if s.verdict == "failed")
        raise NotPromoted(
            file=path, stage=stage.name, verdict=stage.verdict, reason=stage.reason, fix=stage.fix,
            report=report,
        )  # fmt: skip
    return record
