"""Whether a program has the operands and outputs that its task asks for."""

from __future__ import annotations

from collections.abc import Iterator

from codetta.author.report import Stage
from codetta.author.skeleton import annotation, returned, short, signature
from codetta.author.task import Task, TaskOperand, TaskOutput
from codetta.language.program import Output, Program
from codetta.language.types import Kind, Type

_KINDS = {
    "tile": Kind.TILE, "row": Kind.ROW, "col": Kind.COL, "scalar": Kind.SCALAR,
    "index": Kind.INDEX, "rotary": Kind.ROTARY,
}  # fmt: skip
_OVER = {
    Kind.TILE: "a tile", Kind.COL: "one value per row", Kind.ROW: "one value per column",
    Kind.SCALAR: "one value",
}  # fmt: skip


def contract(program: Program, task: Task) -> Stage:
    """Operands and outputs by name, kind, width and dtype; every difference, and what to write."""
    wrong = list(differences(program, task))
    if wrong:
        fix = f"write `def {signature(task, program.name)}:` and `{returned(task)}`"
        return Stage(name="contract", verdict="failed", reason="; ".join(wrong), fix=fix)
    facts = {
        "operands": ", ".join(o.name for o in program.operands) or "none",
        "outputs": ", ".join(o.name for o in program.outputs),
    }
    return Stage(name="contract", verdict="passed", facts=facts)


def differences(program: Program, task: Task) -> Iterator[str]:
    """What is not as the task asks, one clause each."""
    if not program.has_acc:
        yield "no output depends on acc"
    declared = {o.name: o for o in program.operands}
    for wanted in task.operands:
        if wanted.name not in declared:
            yield f"operand {wanted.name}: {annotation(wanted)} is missing"
            continue
        found = declared.pop(wanted.name)
        if not _same(wanted, found.kind, found.type):
            yield f"operand {found} should be {annotation(wanted)}"
    for name in declared:
        yield f"operand {name} is not one of the task's"
    yield from _outputs(program, task)


def _same(wanted: TaskOperand, kind: Kind, type_: Type) -> bool:
    wide = kind in (Kind.TILE, Kind.ROW)
    return kind is _KINDS[wanted.kind] and (not wide or type_.cols == wanted.width)


def _outputs(program: Program, task: Task) -> Iterator[str]:
    returned_ = {o.name: o for o in program.outputs}
    if program.bare:
        names = ", ".join(o.name for o in task.outputs)
        yield f"one value is returned without a name; the task asks for {names}"
        if len(task.outputs) > 1:
            return
        returned_ = {task.outputs[0].name: program.outputs[0]}
    for wanted in task.outputs:
        if wanted.name not in returned_:
            yield f"output {wanted.name} is missing"
            continue
        yield from _output(program, returned_.pop(wanted.name), wanted)
    for name in returned_:
        yield f"output {name} is not one of the task's"


def _output(program: Program, out: Output, wanted: TaskOutput) -> Iterator[str]:
    found, kind = program.nodes[out.node].type, _KINDS[wanted.kind]
    if found.kind is not kind or found.reduced == (kind is Kind.TILE):
        yield f"output {wanted.name} is {_OVER[found.kind]} and should be {_OVER[kind]}"
        return
    if found.has_cols and found.cols != wanted.width:
        yield f"output {wanted.name} is {found.cols} N wide and should be {wanted.width} N"
    usual = "operand" if kind is Kind.TILE else "accumulator"
    asked = short(wanted.dtype) or usual
    allowed = {asked, "accumulator"} if asked == "fp32" else {asked}
    if asked == "accumulator":
        allowed.add("fp32")
    if out.dtype not in allowed:
        says = {"operand": "the dtype of a", "accumulator": "fp32"}
        yield (
            f"output {wanted.name} is stored in {says.get(out.dtype, out.dtype)} and should be in "
            f"{says.get(asked, asked)}"
        )
