"""What a candidate is timed against, each as a function that does the same work on the same arrays.

    plain      a @ b by cuBLAS, stored in a's dtype: the floor in practice
    eager      the task's reference, operation by operation
    compile    the same under torch.compile
    recorded   the best program that was promoted for the task
    candidate  the program in question
    against    somebody else's kernel, which runs in a process of its own

The references also store each output in the dtype the task asks for, as the programs do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import codetta
from codetta.author.draws import shape
from codetta.author.task import Task, Workload
from codetta.language.meaning import NAMED_DTYPES
from codetta.language.program import Program

Run = Callable[[], Any]
compiled = torch.compile


def contenders(
    task: Task,
    program: Program,
    recorded: Program | None,
    a: Tensor,
    b: Tensor,
    operands: Mapping[str, Any],
) -> tuple[dict[str, Run], dict[str, str]]:
    """The functions by name, each called once to compile it, and a note on each that cannot run."""

    def product() -> Tensor:
        return a @ b

    def reference() -> list[Tensor]:
        return cast_outputs(task, task.reference(a @ b, **operands), a.dtype)

    wanted: dict[str, Run] = {
        "candidate": lambda: codetta.gemm(a, b, program, **operands),
        "plain": product,
        "eager": reference,
        "compile": compiled(reference, dynamic=False),
    }
    if recorded is not None and recorded.digest != program.digest:
        wanted["recorded"] = lambda: codetta.gemm(a, b, recorded, **operands)
    runs: dict[str, Run] = {}
    notes: dict[str, str] = {}
    for name, run in wanted.items():
        try:
            run()
            runs[name] = run
        except Exception as error:
            if name == "candidate":
                raise
            notes[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    return runs, notes


def cast_outputs(task: Task, found: Mapping[str, Tensor], own: torch.dtype) -> list[Tensor]:
    """A reference's outputs in the dtypes in which a program stores them."""
    tiles = {o.name: NAMED_DTYPES.get(o.dtype, own) for o in task.outputs if o.kind == "tile"}
    return [x.to(tiles.get(name, torch.float32)) for name, x in found.items()]


def named(program: Program, result: Any) -> dict[str, Tensor]:
    """Outputs of a call by name."""
    if isinstance(result, Tensor):
        return {program.outputs[0].name: result}
    return dict(result._asdict())


def on_meta(task: Task, w: Workload) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """a, b (laid out as a weight) and the operands without memory, to count and compile by."""
    own = getattr(torch, w.dtype)

    def empty(*shape: int, dtype: torch.dtype = own) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    operands: dict[str, Any] = {}
    for o in task.operands:
        dtype = getattr(torch, o.dtype) if o.dtype else own
        if o.kind == "rotary":
            table = empty(w.m, int(task.constants["rotary_dim"]), dtype=dtype)
            operands[o.name] = table, empty(w.m, dtype=torch.int64)
        else:
            operands[o.name] = empty(
                *shape(o, w), dtype=torch.int64 if o.kind == "index" else dtype
            )
    return empty(w.m, w.k), empty(w.n, w.k).t(), operands
