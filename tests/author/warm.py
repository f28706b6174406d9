"""Isolated processes without the seconds that each spends on importing torch.

``python -I`` is started once, imports what the scripts need, and forks for each process that the
library would have started; the fork gets the arguments, environment, folder, session and
descriptors it would have got. :func:`patched` puts it in the place of ``subprocess.Popen`` in the
two modules that start foreign Python. What runs in the fork is the library's own script.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from codetta.author import foreign, isolation


def serve(control: socket.socket) -> None:
    """In the warm process: fork for each request."""
    sys.path.insert(0, os.environ["CODETTA_ROOT"])
    import torch

    import codetta.author.guard
    import codetta.author.report
    import codetta.programs
    from codetta.author.run_file import _spy

    _ = codetta.epilogue, codetta.language
    with _spy(torch)():  # the first dispatch mode imports for seconds
        torch.ones(2).exp()
    while True:
        request, fds, _, _ = socket.recv_fds(control, 1 << 16, 16)
        if not request:
            return
        if os.fork() == 0:
            _nanny(json.loads(request), fds)
        for fd in fds:
            os.close(fd)
        while True:  # nannies that have ended
            try:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    break
            except ChildProcessError:
                break


def _nanny(request: dict, fds: list[int]) -> None:
    """Between the warm process and the child: tells the child's pid, then its status."""
    status, *fds = fds
    child = os.fork()
    if child:
        for fd in fds:
            os.close(fd)
        os.write(status, f"{child}\n".encode())
        _, code = os.waitpid(child, 0)
        os.write(status, f"{os.waitstatus_to_exitcode(code)}\n".encode())
        os._exit(0)
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    import runpy
    import tempfile

    tempfile.tempdir = None
    high = [os.dup(fd) for fd in fds]  # out of the way of the numbers they will get
    high = [fd if fd > 200 else _above(fd) for fd in high]
    for fd, number in zip(high, request["fds"], strict=True):
        os.dup2(fd, number, inheritable=True)
    for fd in range(3, 400):
        if fd not in request["fds"]:
            with suppress(OSError):
                os.close(fd)
    sys.argv = request["argv"]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        os._exit(1)


def _above(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD, 300)


class Warm:
    """The warm process, seen from the tests."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-u", __file__, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env={"CODETTA_ROOT": str(isolation.ROOT), "OMP_NUM_THREADS": "1", **_path()},
        )
        theirs.close()

    def close(self) -> None:
        self.control.close()
        self.process.wait(20)

    def popen(self, arguments, *, stdin, stdout, stderr, env, cwd, pass_fds, start_new_session):
        """What ``subprocess.Popen`` does, as far as the library asks for it."""
        assert arguments[1:4] == ["-I", "-B", "-u"] and start_new_session
        assert stderr == subprocess.STDOUT
        ours, status = socket.socketpair()
        out = stdout.fileno()
        fds = {0: stdin.fileno(), 1: out, 2: out} | {fd: fd for fd in pass_fds}
        request = {"argv": arguments[4:], "env": env, "cwd": cwd, "fds": list(fds)}
        socket.send_fds(
            self.control, [json.dumps(request).encode()], [status.fileno(), *fds.values()]
        )
        status.close()
        return Child(ours)


class Child:
    """A process as ``subprocess.Popen`` shows it."""

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self._said = b""
        self._read(1, None)
        self.pid = int(self._said.split()[0])
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            try:
                self._read(2, timeout)
            except TimeoutError:
                raise subprocess.TimeoutExpired("warm", timeout or 0.0) from None
            self.returncode = int(self._said.split()[1])
            self._status.close()
        return self.returncode

    def _read(self, lines: int, timeout: float | None) -> None:
        self._status.settimeout(timeout)
        while self._said.count(b"\n") < lines:
            part = self._status.recv(64)
            assert part, "the warm process has ended"
            self._said += part


def _path() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", ""), "HOME": str(Path.home())}


@contextmanager
def patched(started: Warm) -> Iterator[None]:
    """Processes of candidates and foreign kernels are forks of a warm one."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (foreign, isolation):
            stand_in = type("subprocess", (), dict(vars(subprocess)))
            stand_in.Popen = staticmethod(started.popen)
            patch.setattr(module, "subprocess", stand_in)
        yield


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
