"""One guarded call of a candidate: what it may not do besides being wrong.

The memory it gets may hold NaN, its inputs must be as they were afterwards, to the last byte around
them, its outputs must share memory with nothing, and a second call on copies of the inputs, at
other addresses, must give the same bits, as must one into ``out=`` full of NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import codetta
from codetta.author.draws import Case, Inputs
from codetta.author.judge import Judged
from codetta.author.task import Task
from codetta.errors import CodettaError
from codetta.language.meaning import NAMED_DTYPES
from codetta.language.program import Program

#: What every call is watched for, in the order of the report.
CHECKS = ("inputs unchanged", "aliasing", "determinism", "poison")


class Fault(Exception):
    """A call failed a check, or raised.

    Attributes:
        check: one of :data:`CHECKS`, or "call", "shape", "values".
        judged: every tensor that was judged, if values were.
    """

    def __init__(
        self, check: str, reason: str, fix: str = "", judged: tuple[Judged, ...] = ()
    ) -> None:
        super().__init__(reason)
        self.check, self.reason, self.fix, self.judged = check, reason, fix, judged


@dataclass(frozen=True)
class Caller:
    """The candidate and what it is judged by."""

    program: Program
    task: Task

    def __call__(self, x: Inputs, **options: Any) -> dict[str, Tensor]:
        """Outputs by name, in two dimensions at most.

        Raises:
            Fault: it raised, or its outputs have other shapes or dtypes than the task's.
        """
        a, b, operands = x.call(self.task)
        try:
            made = codetta.gemm(a, b, self.program, **options, **operands)
        except (CodettaError, RuntimeError, ArithmeticError, LookupError, TypeError) as error:
            raise Fault("call", f"{type(error).__name__}: {error}".partition("\n")[0]) from error
        named = self.named(made)
        shapes = expected_shapes(self.task, x)
        for name, (shape, dtype) in shapes.items():
            got = named[name]
            lead = x.lead if _has_rows(self.task, name) and x.lead else shape[:1]
            wanted = (*lead, *shape[1:]) if _has_rows(self.task, name) else shape
            if tuple(got.shape) != wanted or got.dtype is not dtype:
                raise Fault(
                    "shape",
                    f"{name} is {tuple(got.shape)} {got.dtype}, the task's is {wanted} {dtype}",
                )
        return {name: named[name].reshape(shape) for name, (shape, _) in shapes.items()}

    def named(self, made: Any) -> dict[str, Tensor]:
        if isinstance(made, Tensor):
            return {self.task.outputs[0].name: made}
        return dict(made._asdict())


def expected_shapes(task: Task, x: Inputs) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each output of the task."""
    m, n = x.a.shape[0], x.b.shape[1]
    own = torch.bfloat16 if x.a.dtype.itemsize == 1 else x.a.dtype
    wide = torch.promote_types(torch.float32, own)
    found = {}
    for o in task.outputs:
        cols = int(n * o.width)
        shape = {"tile": (m, cols), "col": (m,), "row": (cols,), "scalar": ()}[o.kind]
        found[o.name] = shape, NAMED_DTYPES.get(o.dtype, own if o.kind == "tile" else wide)
    return found


def _has_rows(task: Task, name: str) -> bool:
    return any(o.name == name and o.kind in ("tile", "col") for o in task.outputs)


# ------------------------------------------------------------------------- the guarded call
def guarded(caller: Caller, case: Case, x: Inputs) -> dict[str, Tensor]:
    """Outputs by name of a call that does nothing it may not."""
    before = {name: (_memory(t), t._version) for name, t in x.tensors().items()}
    poison(caller.task, x)
    made = caller(x, tile=case.tile)
    unchanged(before, x)
    apart(made, x)
    again = caller(x.map(lambda _, t: _elsewhere(t)), tile=case.tile)
    for name, value in made.items():
        if not same_bits(value, again[name]):
            raise Fault("determinism", f"{name} differs between two calls on equal inputs")
    _into_poison(caller, case, x, made)
    return made


def poison(task: Task, x: Inputs) -> None:
    """Leave NaN in the memory that the outputs will get from the allocator."""
    for shape, dtype in expected_shapes(task, x).values():
        blocks = [filled_with_nan(shape, dtype, x.a.device) for _ in range(3)]
        blocks += [filled_with_nan(shape, torch.float32, x.a.device) for _ in range(3)]
        del blocks


def filled_with_nan(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    if dtype.itemsize > 1:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)


def unchanged(before: Mapping[str, tuple[Tensor, int]], x: Inputs) -> None:
    for name, t in x.tensors().items():
        memory, version = before[name]
        if t._version != version or not torch.equal(_memory(t), memory):
            raise Fault("inputs unchanged", f"the call wrote into its input {name}")


def apart(made: Mapping[str, Tensor], x: Inputs) -> None:
    """Outputs lie in memory of their own."""
    taken = {t.untyped_storage().data_ptr(): name for name, t in x.tensors().items() if t.numel()}
    for name, value in made.items():
        if not value.numel():
            continue
        memory = value.untyped_storage().data_ptr()
        if memory in taken:
            raise Fault("aliasing", f"{name} shares memory with {taken[memory]}")
        taken[memory] = f"the output {name}"


def _into_poison(caller: Caller, case: Case, x: Inputs, made: Mapping[str, Tensor]) -> None:
    """The same bits in outputs that held NaN before."""
    shapes = expected_shapes(caller.task, x)
    out: Any = {}
    for name, (shape, dtype) in shapes.items():
        rows = _has_rows(caller.task, name) and x.lead
        out[name] = filled_with_nan((*x.lead, *shape[1:]) if rows else shape, dtype, x.a.device)
    given = next(iter(out.values())) if caller.program.bare else out
    written = caller(x, tile=case.tile, out=given)
    for name, value in made.items():
        if not same_bits(value, out[name].reshape(value.shape)) or not same_bits(
            value, written[name]
        ):
            raise Fault("poison", f"{name} differs when it is written into memory full of NaN")


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Bitwise, so that NaN equals itself and 0 is not -0."""
    return torch.equal(_bytes(x), _bytes(y))


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def _memory(x: Tensor) -> Tensor:
    """A copy of all the memory that x lies in, its surroundings included."""
    whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
    return whole.clone()


def _elsewhere(x: Tensor) -> Tensor:
    """Equal values with equal strides at another address."""
    whole = torch.empty(0, dtype=x.dtype, device=x.device)
    memory = _memory(x).view(torch.uint8)
    whole.set_(memory.untyped_storage(), x.storage_offset(), x.shape, x.stride())
    return whole
