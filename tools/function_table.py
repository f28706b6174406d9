"""Write the table of functions into docs/authoring.md: `python tools/function_table.py`.

What a function takes and gives is found by calling it on symbolic values of every kind, so the
table cannot say more than the language does.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from codetta import language
from codetta.errors import CodettaError
from codetta.language import functions
from codetta.language.trace import ProgramTracer
from codetta.language.types import Kind, Type
from codetta.language.values import Value

PAGE = Path(__file__).resolve().parent.parent / "docs" / "authoring.md"
BEGIN, END = "<!-- functions: begin -->", "<!-- functions: end -->"
_BLOCK = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)

#: Heading -> functions, in the order of the page.
GROUPS = {
    "element by element": (
        "abs", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "erf", "sigmoid", "relu",
        "square", "silu", "gelu", "softcap", "pow", "maximum", "minimum", "where", "round_to",
    ),
    "pairs and heads": ("unpack", "pack", "group_sum", "group_mean", "ungroup", "rotate"),
    "one value per row": ("rowsum", "rowmean", "rowmax", "moments", "logsumexp", "select"),
    "one value per column, or in all": ("colsum", "colmax", "totalsum"),
    "by index": ("onehot",),
    "sizes and storage": ("columns", "rows", "store"),
}  # fmt: skip
#: What is given to the functions, by the name of the table. ``x`` is tried with each.
KINDS = {
    "tile": Type(Kind.TILE),
    "Row": Type(Kind.ROW),
    "Col": Type(Kind.COL),
    "Scalar": Type(Kind.SCALAR),
    "final": Type(Kind.COL, reduced=True),
}
_FIXED: dict[str, Any] = {"size": 8, "head_dim": 8, "exponent": 2.0, "cap": 2.0, "dtype": "bf16"}
_WIDTHS = {
    "1/2": "half as wide",
    "2": "twice as wide",
    "1/8": "1/size as wide",
    "8": "size times as wide",
}


def table() -> str:
    lines = [
        "| call | the first argument may be | gives, for a tile | computes |",
        "|---|---|---|---|",
    ]
    for heading, names in GROUPS.items():
        lines.append(f"| **{heading}** | | | |")
        lines += map(_line, names)
    return "\n".join(lines)


def listed() -> set[str]:
    """Functions of the language that the table must hold."""
    return {
        name
        for name in language.__all__
        if inspect.isfunction(getattr(language, name)) and hasattr(functions, name)
    }


def _line(name: str) -> str:
    function = getattr(functions, name)
    parameters = inspect.signature(function).parameters.values()
    call = f"{name}({', '.join(_parameters(list(parameters)))})"
    accepted = [kind for kind in KINDS if _given(function, kind) is not None]
    accepted = {"where": ["comparison"], "onehot": ["Index"]}.get(name, accepted)
    gives = _given(function, "tile")
    everything = "anything" if len(accepted) == len(KINDS) else ", ".join(accepted)
    said = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    said = said.replace("|", "\\|").replace("``", "`").replace(":func:", "")
    return f"| `{call}` | {everything} | {gives} | {said} |"


def _parameters(parameters: list[inspect.Parameter]) -> Iterator[str]:
    star = False
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            yield f"*{p.name}"
            continue
        if p.kind is p.KEYWORD_ONLY and not star:
            star = True
            yield "*"
        yield p.name if p.default is p.empty else f"{p.name}={p.default!r}"


def _given(function: Any, kind: str) -> str | None:
    """What the function gives for a first argument of this kind, None if it refuses it."""
    tracer = ProgramTracer("table")
    made = {k: tracer.leaf("operand", t, name=k) for k, t in KINDS.items()}
    special = {
        "rope": tracer.leaf("operand", Type(Kind.ROTARY), name="rope"),
        "index": tracer.leaf("operand", Type(Kind.INDEX), name="index"),
        "like": made["tile"],
    }
    arguments: dict[str, Any] = {}
    positional: list[Any] = []
    for i, p in enumerate(inspect.signature(function).parameters.values()):
        if p.kind is p.VAR_POSITIONAL or (p.default is not p.empty and p.name not in _FIXED):
            continue
        first: Any = made[kind]
        if p.name == "condition":
            first = made[kind] > 0.0
        value = first if i == 0 and p.name not in special else special.get(p.name)
        value = _FIXED.get(p.name, made[kind]) if value is None else value
        if p.kind is p.KEYWORD_ONLY:
            arguments[p.name] = value
        else:
            positional.append(value)
    try:
        result = function(*positional, **arguments)
    except CodettaError:
        return None
    parts = result if isinstance(result, tuple) else (result,)
    parts = tuple(x.value if isinstance(x, functions.Store) else x for x in parts)
    words = [_type(x) for x in parts]
    return words[0] if len(words) == 1 else f"two: {words[0]}"


def _type(value: Value) -> str:
    t = value.type
    name = {Kind.TILE: "tile", Kind.ROW: "Row", Kind.COL: "Col", Kind.SCALAR: "Scalar"}[t.kind]
    if t.reduced:
        return {"Col": "final (M,)", "Row": "final (N,)", "Scalar": "final ()"}[name]
    width = _WIDTHS.get(str(t.cols), "") if t.has_cols else ""
    return f"{name}, {width}" if width else name


def page(text: str) -> str:
    """The page's text with the table between its markers brought up to date."""
    return _BLOCK.sub(lambda _: f"{BEGIN}\n\n{table()}\n\n{END}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
