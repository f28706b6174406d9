"""What is asked for: a formula, its operands, a reference in plain PyTorch, and sizes.

A task is one Python file that binds ``TASK``. The tasks of the library lie in ``codetta/author/
tasks``; any other file with a ``TASK`` is one, too. A task's reference is the author of the task's
code, not the candidate's: it runs in the verifying process, the candidate's Python never does.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from codetta.errors import UnknownTask

OperandKind = Literal["tile", "row", "col", "scalar", "index", "rotary"]
#: How values of an operand are drawn; see :mod:`codetta.author.draws`.
#:   normal    N(0, 1)
#:   positive  |N(0, 1)| + 0.1
#:   mask      0 or 1, each half of the time
#:   keep      a dropout mask as it is applied: 0 (one in ten) or 1 / 0.9
#:   index     a column, one in eight outside of [0, N) (-100, N or N + 1)
#:   scale     2^u, u uniform in [-4, 0]: what quantization divided out
#:   gain      uniform in [64, 256]: brings N(0, 1) near 448, and some of it beyond
#:   position  whole numbers 0, 1, 2, ... along the operand
#:   angles    a rotary table of random angles, with random positions
#:   zeros     0
Values = Literal[
    "normal", "positive", "mask", "keep", "index", "scale", "gain", "position", "angles", "zeros"
]
Level = Literal["easy", "medium", "hard"]
_TASKS = Path(__file__).parent / "tasks"


@dataclass(frozen=True)
class TaskOperand:
    """An operand the program must declare, by this name and kind.

    Attributes:
        width: columns as a multiple of N (tile, row).
        dtype: of the tensor, as PyTorch names it; "" is the workload's. An index is int64.
        values: its distribution.
        differentiable: whether a gradient is asked for.
    """

    name: str
    kind: OperandKind
    doc: str
    width: Fraction = Fraction(1)
    dtype: str = ""
    values: Values = "normal"
    differentiable: bool = True


@dataclass(frozen=True)
class TaskOutput:
    """An output the program must return, by this name.

    Attributes:
        kind: "tile" (M, w N), "col" (M,), "row" (w N,) or "scalar" ().
        dtype: of a stored tile, as in ``store(x, "e4m3")``; "" for a's. Reductions are fp32.
    """

    name: str
    kind: Literal["tile", "col", "row", "scalar"]
    doc: str
    width: Fraction = Fraction(1)
    dtype: str = ""


@dataclass(frozen=True)
class Workload:
    """Sizes and dtype of one call: a is (m, k), b (k, n)."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.dtype}"


@dataclass(frozen=True)
class Task:
    """One exercise.

    Attributes:
        name: of the file; lower case with underscores.
        formula: what to compute, one output a line; acc stands for a b.
        reference: (acc, **operands) -> {output: Tensor}, plain differentiable PyTorch in the dtype
            of acc, the same formula evaluated once in fp64 (the oracle) and once in the workload's
            dtype (what PyTorch's own error is). acc is (M, N), a tile (M, w N), a row (w N,), a
            col and an index (M,), a scalar (); a rotary operand is (table, positions), as
            codetta.gemm takes it, with ``constants["rotary_dim"]`` columns in the table.
        addends: (acc, **operands) -> {output: Tensor}, the sum of the absolute addends of an
            output's last expression, for the budget's second term; evaluated in fp64. An output
            it leaves out has its own absolute value.
        constants: numbers that belong to the formula (eps, cap, head size), for reading.
        gradient: whether backward is verified.
        granule: N must be a multiple of it, and so are the fuzzed N.
        correctness: the least that is verified; fuzzed sizes come on top.
        benchmark: sizes that are timed.
        near: library programs worth reading.
    """

    name: str
    title: str
    level: Level
    formula: str
    operands: tuple[TaskOperand, ...]
    outputs: tuple[TaskOutput, ...]
    reference: Callable[..., Mapping[str, Tensor]]
    addends: Callable[..., Mapping[str, Tensor]] | None = None
    constants: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    gradient: bool = True
    granule: int = 1
    correctness: tuple[Workload, ...] = (
        Workload(129, 264, 72),
        Workload(1, 8, 8, "float32"),
        Workload(300, 520, 256, "float16"),
    )
    benchmark: tuple[Workload, ...] = (Workload(16384, 4096, 4096), Workload(16384, 8192, 2048))
    near: tuple[str, ...] = ()
    notes: str = ""


@cache
def names() -> tuple[str, ...]:
    """Of the library's tasks, from easy to hard."""
    levels = {"easy": 0, "medium": 1, "hard": 2}
    found = [load(p) for p in sorted(_TASKS.glob("[a-z]*.py"))]
    return tuple(t.name for t in sorted(found, key=lambda t: (levels[t.level], t.name)))


def find(name: str) -> Task:
    """A task of the library by name, or of a file by its path.

    Raises:
        UnknownTask: there is none of that name, or the file binds no ``TASK``.
    """
    path = Path(name)
    if path.suffix == ".py":
        return load(path)
    path = _TASKS / f"{name}.py"
    if not path.is_file():
        raise UnknownTask(name=name, allowed=", ".join(names()))
    return load(path)


def load(path: Path) -> Task:
    """The ``TASK`` of a file."""
    spec = importlib.util.spec_from_file_location(f"codetta_task_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UnknownTask(name=str(path), allowed=", ".join(names()))
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # torch.compile imports the module of a function it inlines
    spec.loader.exec_module(module)
    task = getattr(module, "TASK", None)
    if not isinstance(task, Task):
        raise UnknownTask(name=f"{path} (it binds no TASK)", allowed=", ".join(names()))
    return task
