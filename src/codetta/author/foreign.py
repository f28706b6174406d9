"""A process that runs a foreign kernel, as its parent sees it: fresh inputs in, raw bytes out.

Nothing that comes back is trusted: sizes are checked before they are read, times are compared with
the parent's own clock, and inputs come back as digests that the parent compares with its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from codetta.author.candidate import clean
from codetta.author.draws import Inputs
from codetta.author.isolation import ROOT

_SCRIPT = Path(__file__).with_name("run_file.py")
_LONGEST_LINE = 1 << 16
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES")


class Caught(Exception):
    """What a foreign kernel did wrong: a guard's name and a sentence."""

    def __init__(self, guard: str, reason: str) -> None:
        super().__init__(reason)
        self.guard, self.reason = guard, reason


@dataclass(frozen=True)
class Answer:
    """Of one call: outputs, gradients by input, the times that it and the parent's clock say."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    said_s: float
    wall_s: float
    used: tuple[str, ...]


class Foreign:
    """``with Foreign(path) as kernel: kernel.call(...)``.

    Raises:
        Caught: on entering, the file raised, or is not there; on a call, it broke a rule.
    """

    def __init__(self, path: str | Path, *, device: str = "cpu", timeout_s: float = 120.0) -> None:
        self.path, self.device, self.timeout_s = Path(path), device, timeout_s
        self._stack = ExitStack()

    def __enter__(self) -> Foreign:
        try:
            source = self.path.read_bytes()
        except OSError as error:
            raise Caught("file", f"{self.path} cannot be read: {error.strerror}") from None
        self.home = self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix="codetta-", ignore_cleanup_errors=True)
        )
        self._printed = self._stack.enter_context(tempfile.TemporaryFile())
        given = self._stack.enter_context(tempfile.TemporaryFile())
        given.write(source)
        given.seek(0)
        asks, self._ask = os.pipe()
        self._answer, answers = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-u", str(_SCRIPT), str(self.path)],
            stdin=given, stdout=self._printed, stderr=subprocess.STDOUT, cwd=self.home,
            env=self._environment(f"{asks},{answers}"), pass_fds=(asks, answers),
            start_new_session=True,
        )  # fmt: skip
        os.close(asks)
        os.close(answers)
        self._stack.callback(self._end)
        try:
            self._receive("loaded")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def printed(self) -> str:
        self._printed.seek(0)
        return clean(self._printed.read(1 << 16).decode(errors="replace"))

    def call(
        self,
        x: Inputs,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        *,
        upstream: Mapping[str, Tensor] | None = None,
        wanted: Sequence[str] = (),
        reuse: bool = False,
        spy: bool = False,
        pause_s: float = 0.0,
    ) -> Answer:
        """One call on inputs of its own.

        Args:
            shapes: shape and dtype of each output.
            upstream, wanted: gradients of all outputs, and the inputs whose gradients are wanted.
            reuse: put these inputs into the memory of those of the call before.
            spy: list the operators it calls; not timed.
            pause_s: how long to wait for outputs to change after the call.
        """
        arrays = [("input", name, t) for name, t in x.tensors().items()]
        arrays += [("upstream", name, t) for name, t in (upstream or {}).items()]
        data = [_raw(t) for _, _, t in arrays]
        sizes = [_size(shape, dtype) for shape, dtype in shapes.values()]
        request = {
            "arrays": [
                {"role": role, "name": f"d {name}" if role == "upstream" else name,
                 "dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
                for role, name, t in arrays
            ],
            "outputs": list(shapes), "wanted": list(wanted), "reuse": reuse, "spy": spy,
            "pause": pause_s, "bytes": sizes, "sizes": [len(d) for d in data],
        }  # fmt: skip
        self._send(json.dumps(request).encode() + b"\n", *data)
        self._receive("ready")
        begun = time.perf_counter()
        self._send(b"go\n")
        done, _ = self._receive("done")
        wall = time.perf_counter() - begun
        back = [_size(tuple(x.tensors()[n].shape), x.tensors()[n].dtype) for n in wanted]
        facts, payload = self._receive("inputs", (*sizes, *back))
        self._obeyed(facts, x, shapes)
        outputs = {
            name: _tensor(p, shape, dtype)
            for (name, (shape, dtype)), p in zip(shapes.items(), payload, strict=False)
        }
        grads = {
            name: _tensor(p, tuple(x.tensors()[name].shape), x.tensors()[name].dtype)
            for name, p in zip(wanted, payload[len(shapes) :], strict=False)
        }
        if len(outputs) != len(shapes):
            raise Caught("answer", "fewer outputs came back than the task has")
        if wanted and len(grads) != len(wanted):
            raise Caught("gradient", "its outputs have no gradient, the task asks for one")
        said = float(done["ns"]) * 1e-9 if isinstance(done.get("ns"), int) else 0.0
        return Answer(outputs, grads, said, wall, tuple(map(str, facts.get("used", ()))))

    # ---- what it must not have done
    def _obeyed(self, facts: Mapping[str, Any], x: Inputs, shapes: Mapping[str, Any]) -> None:
        if problem := str(facts.get("problem", "")):
            guard, _, reason = problem.partition(": ")
            raise Caught(clean(guard, 40), clean(reason, 300))
        for found, (name, (shape, dtype)) in zip(
            facts.get("arrays", ()), shapes.items(), strict=False
        ):
            said = {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}
            if found != said:
                raise Caught("shape", f"{name} is {clean(str(found), 100)}, the task's is {said}")
        digests = {n: hashlib.sha256(_raw(t)).hexdigest() for n, t in x.tensors().items()}
        wrong = [n for n, d in digests.items() if facts.get("inputs", {}).get(n) != d]
        if wrong or facts.get("written"):
            raise Caught("inputs", f"the call wrote into its input {(wrong or ['?'])[0]}")
        if facts.get("refused"):
            raise Caught("refused", clean(str(facts["refused"][-1]), 200))

    # ---- the pipes
    def _send(self, *parts: bytes) -> None:
        try:
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[os.write(self._ask, view) :]
        except BrokenPipeError:
            raise Caught("process", f"it ended by itself; it printed {self.printed!r}") from None

    def _receive(
        self, expected: str, allowed: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[bytes]]:
        """A message that has ``expected``, and payloads of the sizes that are allowed."""
        deadline = time.monotonic() + self.timeout_s
        line = b""
        while not line.endswith(b"\n"):
            line += self._read(1, deadline)
            if len(line) > _LONGEST_LINE:
                raise Caught("answer", "what comes back is no answer")
        try:
            message = json.loads(line)
            sizes = [int(s) for s in message.get("sizes", ())]
        except (ValueError, AttributeError, TypeError, RecursionError):
            raise Caught("answer", "what comes back is no answer") from None
        if "raised" in message:
            raise Caught("raised", clean(str(message["raised"]), 500))
        if expected not in message:
            raise Caught("answer", "what comes back is no answer")
        if sizes != list(allowed)[: len(sizes)] and not message.get("problem"):
            self._shape(message)
        payload = [self._read(s, deadline) for s in sizes] if not message.get("problem") else []
        return message, payload

    def _shape(self, message: Mapping[str, Any]) -> None:
        raise Caught("shape", f"its outputs are {clean(str(message.get('arrays')), 200)}")

    def _read(self, count: int, deadline: float) -> bytes:
        got = bytearray()
        while len(got) < count:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._answer], [], [], max(0.0, left))
            if not ready:
                raise Caught("timeout", f"no answer within {self.timeout_s:g} s")
            part = os.read(self._answer, min(count - len(got), 1 << 20))
            if not part:
                raise Caught("process", f"it ended by itself; it printed {self.printed!r}")
            got += part
        return bytes(got)

    def _end(self) -> None:
        for fd in (self._ask, self._answer):
            os.close(fd)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _environment(self, pipes: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        own = {
            "HOME": self.home, "TMPDIR": self.home, "CODETTA_ROOT": str(ROOT),
            "CODETTA_PIPES": pipes, "CODETTA_DEVICE": self.device,
            "CODETTA_CPU_S": str(int(self.timeout_s) * 4 + 1), "PYTHONHASHSEED": "0",
        }  # fmt: skip
        if self.device == "cpu":
            own |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return kept | own


def _raw(t: Tensor) -> bytes:
    flat = t.detach().contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.cpu().numpy().tobytes())


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    count = 1
    for s in shape:
        count *= s
    return count * dtype.itemsize


def _tensor(data: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
