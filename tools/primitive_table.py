"""Write the table of primitives into docs/language.md: `python tools/primitive_table.py`."""

from __future__ import annotations

import re
from pathlib import Path

from codetta.language.primitives import PRIMITIVES, Family

PAGE = Path(__file__).resolve().parent.parent / "docs" / "language.md"
BEGIN, END = "<!-- primitives: begin -->", "<!-- primitives: end -->"
_BLOCK = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)


def table() -> str:
    lines = ["| primitive | values | attributes | computes |", "|---|---|---|---|"]
    for family in Family:
        lines.append(f"| **{family.value}** | | | |")
        for p in PRIMITIVES.values():
            if p.family is family:
                attrs = ", ".join(f"`{a}`" for a in p.attrs)
                formula = p.formula.replace("|", "\\|").replace("<", "&lt;")
                lines.append(f"| `{p.name}` | {p.arity} | {attrs} | {formula} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page's text with the table between its markers brought up to date."""
    return _BLOCK.sub(lambda _: f"{BEGIN}\n\n{table()}\n\n{END}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
