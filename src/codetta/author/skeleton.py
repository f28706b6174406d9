"""The file an author starts from: what the task wants, in the words of the language, and no answer.

It says the same as the contract that ``codetta check`` compares a program with, because both are
made here from the task's operands and outputs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from fractions import Fraction

from codetta.author.task import Task, TaskOperand, TaskOutput, find
from codetta.language.meaning import NAMED_DTYPES
from codetta.programs import catalog

_KINDS = {
    "tile": "Tile", "row": "Row", "col": "Col", "scalar": "Scalar", "index": "Index",
    "rotary": "Rotary",
}  # fmt: skip
#: Shape of an operand or output; {} is its number of columns.
_SHAPES = {
    "tile": "(M, {})", "row": "({},)", "col": "(M,)", "scalar": "()", "index": "(M,)",
    "rotary": "(table, positions)",
}  # fmt: skip
_SHORT = {str(dtype).removeprefix("torch."): name for name, dtype in NAMED_DTYPES.items()}
_WIDTH = 96


def skeleton(task: Task | str, *, named: str = "", file: str = "FILE") -> str:
    """A Python file for a task: formula, operands, outputs, and an epilogue yet to be written.

    Args:
        task: or its name.
        named: what the file calls the task, its name by default; the path of a task's file.
        file: what the commands at the end call the file.
    """
    task = find(task) if isinstance(task, str) else task
    kinds = sorted({_KINDS[o.kind] for o in task.operands})
    stores = ["store"] if any(_stored(o) for o in task.outputs) else []
    imports = ["import codetta"]
    if kinds or stores:
        imports.append(f"from codetta.language import {', '.join(kinds + stores)}")
    constants = [f"{name.upper()} = {value!r}" for name, value in task.constants.items()]
    parts = [
        '"""' + "\n".join(_docstring(task, file)) + '\n"""',
        "\n".join(imports),
        f'TASK = "{named or task.name}"',
        *(["\n".join(constants)] if constants else []),
    ]
    body = [
        "@codetta.epilogue",
        f"def {signature(task)}:",
        *textwrap.wrap(
            f"Write it, and {returned(task)}.",
            _WIDTH,
            initial_indent="    # ",
            subsequent_indent="    # ",
        ),
        "    raise NotImplementedError",
    ]
    return "\n\n".join(parts) + "\n\n\n" + "\n".join(body) + "\n"


def signature(task: Task, name: str = "") -> str:
    """``name(acc, bias: Row, keep: Tile)``."""
    operands = [f"{o.name}: {annotation(o)}" for o in task.operands]
    return f"{name or task.name}({', '.join(['acc', *operands])})"


def annotation(operand: TaskOperand) -> str:
    """``Row`` or ``Tile(width=0.5)``."""
    kind = _KINDS[operand.kind]
    return kind if operand.width == 1 else f"{kind}(width={_width(operand.width)})"


def returned(task: Task) -> str:
    """``return {"y": ..., "q": store(..., "e4m3")}``."""
    values = (f'"{o.name}": {_value(o)}' for o in task.outputs)
    return f"return {{{', '.join(values)}}}"


def short(dtype: str) -> str:
    """The language's name of a dtype, given that or PyTorch's."""
    return _SHORT.get(dtype, dtype)


def _value(output: TaskOutput) -> str:
    dtype = _stored(output)
    return f'store(..., "{dtype}")' if dtype else "..."


def _stored(output: TaskOutput) -> str:
    """The dtype that must be named in the program, or ""."""
    usual = "fp32" if output.kind != "tile" else ""
    return "" if short(output.dtype) == usual else short(output.dtype)


def _width(width: Fraction) -> str:
    exact = width.denominator & (width.denominator - 1) == 0
    return f"{float(width):g}" if exact and width.denominator <= 8 else str(width)


# ------------------------------------------------------------------------------ docstring
def _docstring(task: Task, file: str) -> Iterator[str]:
    yield f"{task.title}."
    yield ""
    yield from (f"    {line}" for line in task.formula.splitlines())
    yield ""
    yield from _wrapped("acc is a @ b, M x N, in fp32; one function serves every tile of it.")
    if task.granule > 1:
        yield f"N is a multiple of {task.granule}."
    if task.notes:
        yield from _wrapped(task.notes)
    if task.operands:
        yield ""
        yield "Operands:"
        for o in task.operands:
            yield from _item(o.name, f"{annotation(o)} {_shape(o.kind, o.width)}, {_about(o)}")
    yield ""
    yield "Outputs:"
    for out in task.outputs:
        yield from _item(out.name, f"{_kind(out)}: {_sentence(out.doc)}")
    yield ""
    yield from _wrapped(
        "Its gradient is derived from it, and verified too."
        if task.gradient
        else "No gradient is asked for."
    )
    if task.near:
        known = [n for n in task.near if n in catalog()]
        yield f"Near it: {', '.join(f'codetta programs {n}' for n in known)}."
    yield f"Next: codetta check {file}; codetta verify {file}."


def _kind(o: TaskOutput) -> str:
    if o.kind == "tile":
        return f"a tile {_shape('tile', o.width)} in {_stored(o) or 'the dtype of a'}"
    over = {"col": "one value per row", "row": "one value per column", "scalar": "one value"}
    return f"{over[o.kind]} {_shape(o.kind, o.width)} in {_stored(o) or 'fp32'}, a reduction"


def _about(o: TaskOperand) -> str:
    said = _sentence(o.doc)
    return said if o.differentiable else f"{said} No gradient."


def _shape(kind: str, width: Fraction) -> str:
    columns = "N" if width == 1 else f"{width} N" if width > 1 else f"N/{width.denominator}"
    return _SHAPES[kind].format(columns)


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _item(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        f"{name}: {text}", _WIDTH, initial_indent="    ", subsequent_indent="        "
    )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH)
