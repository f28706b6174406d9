"""Limits and refusals inside the process that executes an author's file.

An audit hook cannot be taken off again, and says what is not allowed where it happens, as an
exception with the author's line. Native code gets around it; see :mod:`codetta.author.isolation`.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from collections import deque
from typing import Any

_MEMORY = 6 << 30  # bytes of private memory
_FILE = 16 << 20  # bytes of a file, of the answer and of what is printed
_PROCESSES = (
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.startfile", "pty.spawn",
    "subprocess.Popen",
)  # fmt: skip
_FILES = (
    "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir",
    "os.symlink", "os.truncate", "os.utime", "shutil.move", "shutil.rmtree",
)  # fmt: skip
_SIGNALS = ("os.kill", "os.killpg", "signal.pthread_kill")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Refused(PermissionError):
    """What an author's file tried and may not do."""


#: What was refused in this process, the last few.
refused: deque[str] = deque(maxlen=8)


def enter(cpu_s: int, *, gpu: bool = False) -> None:
    """Apply the limits to this process and refuse, from now on, what leaves it.

    Args:
        gpu: it may compile and run kernels there: processes are allowed, memory is not limited.
    """
    _limit(resource.RLIMIT_CPU, cpu_s)
    if not gpu:
        _limit(resource.RLIMIT_DATA, _MEMORY)
    _limit(resource.RLIMIT_FSIZE, _FILE)
    _limit(resource.RLIMIT_CORE, 0)
    home = os.path.realpath(tempfile.gettempdir()) + os.sep

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if gpu and event in _PROCESSES:
            return
        try:
            _watch(event, arguments, home)
        except Refused as error:
            refused.append(str(error))
            raise

    sys.addaudithook(hook)


def _limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _watch(event: str, arguments: tuple[Any, ...], home: str) -> None:
    if event in _PROCESSES:
        raise Refused(f"a candidate may not start a process ({event})")
    if event in _SIGNALS:
        raise Refused(f"a candidate may not signal a process ({event})")
    if event.startswith("socket.") and event not in ("socket.__new__", "socket.gethostname"):
        raise Refused(f"a candidate may not use the network ({event})")
    if event == "open":
        path, mode, flags = arguments
        writes = bool(set(mode) & set("wax+")) if isinstance(mode, str) else flags & _WRITING
        if writes and not _inside(path, home):
            raise Refused(f"a candidate may not write {path!r}")
    elif event in _FILES and not all(_inside(x, home) for x in _paths(arguments)):
        raise Refused(f"a candidate may not change files ({event})")


def _paths(arguments: tuple[Any, ...]) -> list[Any]:
    return [x for x in arguments if isinstance(x, str | bytes)]


def _inside(path: Any, home: str) -> bool:
    if isinstance(path, int):  # a descriptor that is open already
        return True
    try:
        return os.path.realpath(os.fsdecode(path)).startswith(home)
    except (TypeError, ValueError):
        return False
