"""A Python script in a process of its own: a fresh folder, no secrets, limits, one way to answer.

The script gets its input on stdin and answers on a file descriptor that nothing else uses, so that
what it prints does not mix with the answer. Both are files and no pipes: a grandchild that
keeps one open cannot make the parent wait. When the process ends, or its time is up, its whole
process group is killed and its folder removed.

This keeps honest files honest and careless ones harmless. It is no jail: the process runs as the
same user, and :mod:`codetta.author.guard`, which refuses processes, sockets and files elsewhere,
can be got around by native code. What is *judged* does not depend on it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import codetta

#: The folder that ``import codetta`` is found in.
ROOT = Path(codetta.__file__).resolve().parent.parent
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
_LARGEST = 1 << 20  # bytes of an answer and of what is printed that are read


@dataclass(frozen=True)
class Ended:
    """How it went.

    Attributes:
        status: exit status, or minus the signal.
        result: what was written to the descriptor named by ``CODETTA_RESULT_FD``.
        printed: stdout and stderr, from the beginning.
    """

    status: int
    result: bytes
    printed: str
    timed_out: bool


def run_isolated(arguments: Sequence[str], stdin: bytes, *, timeout_s: float) -> Ended:
    """Run ``python -I SCRIPT ARGUMENTS...`` and wait at most ``timeout_s`` seconds.

    The script finds the folder of ``codetta`` in ``CODETTA_ROOT``, folders in which this process
    finds packages in ``CODETTA_PATH`` (``-I`` ignores ``PYTHONPATH``), and the limit of its
    processor time in ``CODETTA_CPU_S``; :func:`codetta.author.guard.enter` applies the limits.
    """
    with (
        tempfile.TemporaryDirectory(prefix="codetta-", ignore_cleanup_errors=True) as home,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as result,
        tempfile.TemporaryFile() as printed,
    ):
        given.write(stdin)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-u", *arguments],
            stdin=given,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=_environment(home, result.fileno(), timeout_s),
            cwd=home,
            pass_fds=(result.fileno(),),
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return Ended(
            process.returncode, _read(result), _read(printed).decode(errors="replace"), timed_out
        )


def _environment(home: str, result: int, timeout_s: float) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return kept | {
        "HOME": home,
        "TMPDIR": home,
        "CODETTA_ROOT": str(ROOT),
        "CODETTA_PATH": os.pathsep.join(x for x in sys.path if x and x != os.getcwd()),
        "CODETTA_RESULT_FD": str(result),
        "CODETTA_CPU_S": str(int(timeout_s) + 1),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(_LARGEST)
