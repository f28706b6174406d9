"""GEMM calls of a function, recorded without memory, and the kernels they need as jobs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from codetta.backends.cuda.assembly import outline
from codetta.backends.cuda.config_cache import versions
from codetta.backends.cuda.configs import Configuration
from codetta.backends.cuda.cut import cut_of
from codetta.backends.cuda.launch import accumulator
from codetta.backends.cuda.rules import NotLowerable
from codetta.backends.layout import parsed
from codetta.language.program import Program
from codetta.tuning.workers import Job, Work


@dataclass(frozen=True)
class GemmCall:
    """One call of the operator ``codetta::gemm``; its tensors have no memory."""

    program: Program
    a: Tensor
    b: Tensor
    operands: tuple[Tensor, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.a, self.b, *self.operands

    def without_epilogue(self) -> GemmCall:
        """The product of a program that runs as two kernels."""
        cut = cut_of(self.program, self.a.dtype)
        if cut is None:
            return GemmCall(accumulator, self.a, self.b, ())
        return GemmCall(cut.first, self.a, self.b, tuple(cut.first_operands(self.operands)))


@dataclass(frozen=True)
class CallJob:
    """The kernel of a call, for a worker.

    Attributes:
        key: hash of the kernel's identity, of the code that its epilogue refers to and of versions.
    """

    given: GemmCall
    config: Configuration
    key: str

    def data(self) -> dict[str, Any]:
        return {
            "program": self.given.program.text,
            "tensors": [_described(x) for x in self.given.tensors],
            "config": self.config.data(),
            "key": self.key,
        }

    def call(self) -> tuple[Program, Tensor, Tensor, list[Tensor]]:
        return self.given.program, self.given.a, self.given.b, list(self.given.operands)

    @staticmethod
    def of(data: dict[str, Any]) -> CallJob:
        config = Configuration.of(data["config"], "compiled beforehand")
        assert config is not None
        a, b, *operands = (_tensor(x) for x in data["tensors"])
        given = GemmCall(Program.parse(data["program"]), a, b, tuple(operands))
        return CallJob(given, config, data["key"])


def work(data: dict[str, Any]) -> Work:
    """The job that a worker was sent."""
    return CallJob.of(data) if "tensors" in data else Job.of(data)


def recorded(run: Callable[[], object]) -> list[GemmCall]:
    """The GEMM calls that ``run`` makes on tensors without memory, backward passes included."""
    with _Recorder() as recorder:
        run()
    return recorder.calls


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[GemmCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.codetta.gemm.default:
            text, a, b, operands, *_ = args
            bare = [x.detach() for x in (a, b, *operands)]
            self.calls.append(GemmCall(parsed(text), bare[0], bare[1], tuple(bare[2:])))
        return func(*args, **(kwargs or {}))


def jobs(calls: Iterable[GemmCall], device: int | None) -> list[CallJob]:
    """The kernels of these calls, each once.

    Args:
        device: whose measurements choose configurations; None for those that are shipped.
    """
    found: dict[str, CallJob] = {}
    for call in calls:
        try:
            made = _job(call, device)
        except NotLowerable:
            made = _job(call.without_epilogue(), device)
        found.setdefault(made.key, made)
    return list(found.values())


def _job(call: GemmCall, device: int | None) -> CallJob:
    outlined = outline(call.program, call.a, call.b, call.operands, index=device)
    identity = outlined.identity(call.a, call.b, call.operands)
    text = f"{identity}\n{versions()}\n{_code()}"
    return CallJob(call, outlined.config, hashlib.sha256(text.encode()).hexdigest()[:24])


@lru_cache(maxsize=1)
def _code() -> str:
    """Hash of what is compiled into kernels beside their generated source."""
    from codetta.backends import cuda

    names = ("operations", "quack", "short_sum_operations")
    files = (Path(cuda.__file__).with_name(f"{name}.py") for name in names)
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def _described(x: Tensor) -> tuple[Sequence[int], Sequence[int], str]:
    return list(x.shape), list(x.stride()), str(x.dtype).removeprefix("torch.")


def _tensor(described: Sequence[Any]) -> Tensor:
    shape, stride, dtype = described
    return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta")
