"""What is written for authors, as text: the guide by section, programs with their source, errors.

For models and agents, which read the same pages as people: the guide is docs/authoring.md, which an
installed package has beside this file.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path

from codetta.author.registry import entries
from codetta.author.task import Task
from codetta.errors import EpilogueError, catalogue
from codetta.programs import Entry, catalog

_HERE = Path(__file__).resolve()
#: In an installed package, and in a checkout.
_GUIDES = (_HERE.with_name("authoring.md"), _HERE.parents[3] / "docs" / "authoring.md")
#: About running commands: not needed by one who is shown their reports.
_RUNNING = ("The path", "With a coding agent")
_REPORTS = "Reading the reports"
_SHOWN = ("`codetta check`", "`codetta verify`")  # parts of it


class NotThere(LookupError):
    """Nothing of that name; the message says what there is."""


# --------------------------------------------------------------------------------- the guide
@cache
def guide() -> str:
    """docs/authoring.md."""
    page = next(p for p in _GUIDES if p.is_file())
    return page.read_text(encoding="utf-8")


def sections() -> dict[str, str]:
    """The guide's sections by title, each with its heading."""
    plain = re.sub(r"<!--.*?-->\n*", "", guide(), flags=re.DOTALL)
    parts = re.split(r"^(?=## )", plain, flags=re.MULTILINE)[1:]
    return {part.splitlines()[0].removeprefix("## "): part for part in parts}


def page(section: str = "") -> str:
    """A section, or all that writing needs."""
    found = sections()
    if section:
        return found[_known(section, found, "section")]
    needed = {title: text for title, text in found.items() if title not in _RUNNING}
    if _REPORTS in needed:
        needed[_REPORTS] = _tables(needed[_REPORTS])
    return "\n".join(needed.values())


def _tables(reports: str) -> str:
    """What the stages of check and verify mean, without sessions to look at."""
    head, *parts = re.split(r"^(?=### )", reports, flags=re.MULTILINE)
    kept = [p for p in parts if p.startswith(tuple(f"### {name}" for name in _SHOWN))]
    return re.sub(r"^```\n\$.*?^```\n", "", "".join([head, *kept]), flags=re.DOTALL | re.MULTILINE)


# ----------------------------------------------------------------------------------- errors
def all_errors() -> dict[str, dict[str, str]]:
    """Messages by name; braces stand for what is filled in."""
    return {cls.__name__: {"message": cls.template} for cls in catalogue()}


def error(name: str) -> dict[str, dict[str, str]]:
    """One, with a wrong and a right example."""
    known = {cls.__name__: cls for cls in catalogue()}
    cls = known[_known(name, known, "error")]
    return {cls.__name__: {"message": cls.template, "wrong": cls.wrong, "right": cls.right}}


def mistakes() -> str:
    """What is refused while a function is traced, one a line."""
    lines = [
        f"- {cls.__name__}: `{wrong}` is wrong, `{right}` is right."
        for cls in catalogue()
        if issubclass(cls, EpilogueError)
        and (wrong := _short(cls.wrong))
        and (right := _short(cls.right))
    ]
    return "\n".join(["## Mistakes", "", *lines, ""])


def _short(example: str) -> str:
    """An example in one line, or "" if it is long."""
    lines = [x.strip() for x in example.splitlines() if not x.startswith(("@", "import", "from"))]
    return "; ".join(lines).replace(":; ", ": ") if len(lines) <= 3 else ""


# --------------------------------------------------------------------------------- programs
def all_programs() -> dict[str, dict[str, str]]:
    """The catalog, then what has been promoted."""
    return {name: _program(entry) for name, entry in _everything().items()}


def program(name: str) -> dict[str, dict[str, str]]:
    """One, with its Python where it has one, and its canonical text."""
    known = _everything()
    if name not in known and f'recorded("{name}")' in known:
        name = f'recorded("{name}")'
    entry = known[_known(name, known, "program")]
    more = {"doc": entry.doc, "source": source(entry), "program": str(entry.program)}
    return {entry.name: _program(entry) | more}


def near(task: Task) -> dict[str, str]:
    """Source of the ready programs that a task names."""
    return {name: source(catalog()[name]) for name in task.near if name in catalog()}


def source(entry: Entry) -> str:
    """The Python of a ready program; "" of a recorded one, of which only the text is kept."""
    if entry.name not in catalog():
        return ""
    module = import_module(f"codetta.programs.{entry.family}")
    assert module.__file__ is not None
    text = Path(module.__file__).read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == entry.name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return ""


def _everything() -> dict[str, Entry]:
    return dict(catalog()) | {e.name: e for e in entries()}


def _program(entry: Entry) -> dict[str, str]:
    return {"formula": entry.formula, "family": entry.family, "call": entry.call}


def _known(name: str, names: Iterable[str], what: str) -> str:
    if name in (known := list(names)):
        return name
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(known)}"
    raise NotThere(f"there is no {what} {name[:100]!r}; {hint}")
