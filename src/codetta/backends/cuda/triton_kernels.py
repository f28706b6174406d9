"""Building, caching and launching the generated kernels.

``pointwise`` has the signature of a backend's (backends/select.py) and returns the same flat list.
A program is analysed once per dtypes and power of two of N (a :class:`Recipe`); source is
generated once per class of arrays (dtype, contiguous or not, row stride a multiple of 16), handed
to Triton through :mod:`linecache` under a name of its own, and compiled once more per alignment of
the pointers. Sizes are arguments, so no M and no N compiles anything new; nothing is tuned. Names
of programs and operands are left out, so that equal computations are one kernel.

A warm call is a dictionary look-up per kernel, one allocation per output and a direct launch of the
compiled kernel, past Triton's own argument analysis.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from codetta.backends.calls import REFERENCE
from codetta.backends.cuda.arrays import allocator
from codetta.backends.cuda.capture import refuse
from codetta.backends.cuda.config_cache import canonical
from codetta.backends.cuda.triton_launch import (
    DTYPES,
    Direct,
    Fixed,
    Host,
    Key,
    Launch,
    contiguous_totals,
)
from codetta.backends.cuda.triton_source import Source, source
from codetta.backends.cuda.triton_stages import cut, stages
from codetta.backends.cuda.triton_task import Cut, Task
from codetta.backends.layout import Tile, default_tile, results
from codetta.errors import TooLarge
from codetta.language.meaning import operand_storage
from codetta.language.program import Program

_LARGEST = 2**31 - 2**16  # columns are counted in 32 bits, and the last block reaches beyond


def pointwise(
    program: Program,
    operands: Sequence[Tensor],
    m: int,
    n: int,
    operand: torch.dtype,
    compute: torch.dtype,
    tile: Tile | None = None,
    raw: bool = False,
) -> list[Tensor]:
    """Run a program without accumulator; arguments and results as in ReferenceBackend.pointwise.

    A rotary position outside its table gives NaN, an index outside [0, N) selects 0.

    Raises:
        MissingRule: a primitive has no entry in LOWERING.
    """
    if m == 0 or n == 0:
        return _empty(program, operands, m, n, operand, compute, tile, raw)
    made = recipe(program, n, operand, compute, tile, raw)
    with on_device(operands[0]):
        return made.run(operands, m, n)


def recipe(
    program: Program,
    n: int,
    operand: torch.dtype,
    compute: torch.dtype,
    tile: Tile | None,
    raw: bool,
) -> Recipe:
    """The kernels of a program for this N, dtypes and tile."""
    key = (program.text, operand, compute, tile, raw, n.bit_length(), n & (n - 1) == 0)
    found = _RECIPES.get(key)
    if found is None:
        found = _RECIPES[key] = Recipe(program, n, operand, compute, tile, raw)
    return found


_HERE = nullcontext()


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it that of x."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.get_device())


def _empty(
    program: Program,
    operands: Sequence[Tensor],
    m: int,
    n: int,
    operand: torch.dtype,
    compute: torch.dtype,
    tile: Tile | None,
    raw: bool,
) -> list[Tensor]:
    """Nothing to compute; vectors over the other axis are sums of nothing."""
    used = tile or default_tile(program)
    described = [
        (r.shape(m, n, used), r.storage(operand, compute))
        for r in results(program, raw)
        for _ in range(max(1, len(r.components)))
    ]
    if all(0 in shape for shape, _ in described):
        return [operands[0].new_empty(shape, dtype=dtype) for shape, dtype in described]
    return REFERENCE.pointwise(program, operands, m, n, operand, compute, tile, raw)


class Recipe:
    """The kernels of one program for one set of dtypes and one power of two of N."""

    def __init__(
        self,
        program: Program,
        n: int,
        operand: torch.dtype,
        compute: torch.dtype,
        tile: Tile | None,
        raw: bool,
    ) -> None:
        plan = stages(program, DTYPES[operand_storage(operand)], DTYPES[compute], raw)
        self.name, self.flat, self.reads = program.name, plan.flat, plan.reads
        tasks = (plan.first, plan.second) if plan.second else (plan.first,)
        self.largest = int(_LARGEST / max((w for t in tasks for w in t.widths), default=1))
        self.direct = plan.flat == tuple((0, i) for i in range(len(plan.flat)))
        self.first = kernel(plan.first, cut(plan.first, n, tile))
        self.second = kernel(plan.second, cut(plan.second, n, None)) if plan.second else None

    def run(self, operands: Sequence[Tensor], m: int, n: int) -> list[Tensor]:
        """Launch them; operands lie on the current device.

        Raises:
            TooLarge: more columns than kernels can count in 32 bits.
            ColdCapture: a kernel must be compiled and a stream is being captured.
        """
        if n > self.largest:
            raise TooLarge(program=self.name, given=f"an N of {n}")
        made = self.first.run(operands, m, n, self.name)
        if self.direct:
            return made
        final: list[Tensor] = []
        if self.second is not None:
            read = [made[i] if from_first else operands[i] for from_first, i in self.reads]
            final = self.second.run(read, m, n, self.name)
        return [(final if stage else made)[i] for stage, i in self.flat]

    def fixed(self, operands: Sequence[Tensor], m: int, n: int) -> Fixed | None:
        """What :meth:`run` has launched, see :meth:`Kernel.fixed`; None where it is two kernels."""
        return self.first.fixed(operands, m, n) if self.direct else None


class Bound:
    """A recipe for calls of one class, see :meth:`Kernel.fixed`: looked up once."""

    __slots__ = ("fixed", "recipe")

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.fixed: Fixed | None = None

    def __call__(self, operands: Sequence[Tensor], m: int, n: int) -> list[Tensor]:
        if self.fixed is not None:
            return self.fixed(operands)
        made = self.recipe.run(operands, m, n)
        self.fixed = self.recipe.fixed(operands, m, n)
        return made


_RECIPES: dict[tuple[Any, ...], Recipe] = {}


# ----------------------------------------------------------------------------- one kernel
def kernel(task: Task, cut: Cut) -> Kernel:
    """The kernel of a task, shared by all that differ in names alone."""
    names = {o.name: f"x{i}" for i, o in enumerate(task.program.operands)}
    gathered = tuple((names[name], count) for name, count in task.gathered)
    anonymous = replace(task, program=canonical(task.program), gathered=gathered)
    key = anonymous, cut
    if key not in _KERNELS:
        _KERNELS[key] = Kernel(anonymous, cut)
    return _KERNELS[key]


_KERNELS: dict[tuple[Task, Cut], Kernel] = {}


class Kernel:
    """A task with its cut, and what was compiled for each class of calls."""

    def __init__(self, task: Task, cut: Cut) -> None:
        self.task, self.cut, self.host = task, cut, Host(task, cut)
        self.total = "total" in self.host.roles
        self.options = compile_options(cut)
        self.sources: dict[Source, tuple[Any, Any]] = {}  # function, launcher
        self.compiled: dict[Key, Launch] = {}
        self.direct: dict[Key, Direct] = {}

    def fixed(self, tensors: Sequence[Tensor], m: int, n: int) -> Fixed | None:
        """What :meth:`run` has launched, for tensors of the same shapes, strides and alignments.

        Sizes and strides are constants: the addresses of tensors count and nothing else of them.
        None where the kernel is not launched directly, or not on the tensors as they are.
        """
        found = None if self.total else self.direct.get(self.host.key(tensors, n))
        return None if found is None else self.host.fixed(found, tensors, m, n)

    def run(self, tensors: Sequence[Tensor], m: int, n: int, name: str) -> list[Tensor]:
        """Launch on the flat operand tensors; returns the outputs. ``name`` is for errors."""
        if self.total:
            tensors = contiguous_totals(list(tensors), self.host.roles)
        key = self.host.key(tensors, n)
        outs: list[Tensor] = self.host.outputs(allocator(tensors[0].device), m, n)
        launch = self.compiled.get(key)
        if launch is not None:
            launch(outs, tensors, m, n)
            return outs
        refuse(name)
        made = source(self.task, self.cut, *self.host.arrays(key))
        if made not in self.sources:
            self.sources[made] = build(made), self.host.launcher(made.parameters)
        function, first = self.sources[made]
        kernel = first(function, outs, tensors, m, n, self.options)
        index = tensors[0].get_device()
        if kernel is not None and index >= 0:
            self.direct[key] = found = Direct(made.parameters, kernel, index)
            self.compiled[key] = self.host.direct(found)
        else:  # the interpreter compiles nothing

            def again(outs: list[Tensor], tensors: Sequence[Tensor], m: int, n: int) -> None:
                first(function, outs, tensors, m, n, self.options)

            self.compiled[key] = again
        return outs


def compile_options(cut: Cut) -> dict[str, Any]:
    """Options of Triton's compiler; fused multiply-add is its default in some versions only."""
    return {"num_warps": cut.warps, "enable_fp_fusion": True}


def build(made: Source) -> Any:
    """The Triton function of a source. Imports Triton."""
    file = f"<codetta {made.name}>"
    lines = made.text.splitlines(keepends=True)
    linecache.cache[file] = (len(made.text), None, lines, file)  # where inspect finds the source
    scope: dict[str, Any] = {"__name__": f"codetta_triton_{made.name}"}
    exec(compile(made.text, file, "exec"), scope)
    return scope[made.name]
