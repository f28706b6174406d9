"""Write docs/programs.md from the catalog: `python tools/program_page.py`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

from codetta.programs import Entry, catalog, row_scale_swiglu

PAGE = Path(__file__).resolve().parent.parent / "docs" / "programs.md"

INTRODUCTION = f"""\
# Programs

Ready epilogues for the parts of a decoder, forward and backward: `codetta.programs`. Generated \
from the catalog by `tools/program_page.py`.

A program is either a `Program`, passed to [`codetta.gemm`](language.md) as it is, or made by a \
factory that takes sizes and constants:

```python
import codetta
from codetta import programs

out = codetta.gemm(x, w.t(), programs.row_scale_swiglu, r=r)
out.z, out.y
q = codetta.gemm(x, wq.t(), programs.row_scale_rotary(head_dim=128), r=r, rope=(table, positions))
```

`codetta programs` prints this list and `codetta programs row_scale_swiglu` one entry with its \
derived backward and its cost. Programs whose signature has no `acc` need no product; they are \
row or pointwise kernels that [plans](plans.md) schedule between products. In formulas, acc is \
the product a b, ⊙ multiplies with broadcasting, ⟨x, y⟩ sums over a row and Σ_m over a column. A \
program printed:

```text
{row_scale_swiglu}
```
"""


def page() -> str:
    families: dict[str, list[Entry]] = {}
    for entry in catalog().values():
        families.setdefault(entry.family, []).append(entry)
    parts = [INTRODUCTION]
    for family, entries in families.items():
        parts.append(f"## {family}\n\n{_design(family)}\n")
        parts += [_section(entry) for entry in entries]
    return "\n".join(parts)


def _design(family: str) -> str:
    """The module's docstring as Markdown: its title a bold line, its formulas as they stand."""
    text = inspect.getdoc(importlib.import_module(f"codetta.programs.{family}")) or ""
    title, _, rest = text.partition("\n\n")
    return f"**{title}**\n\n{rest.replace('``', '`')}"


def _section(entry: Entry) -> str:
    return "\n".join(_lines(entry)) + "\n"


def _lines(entry: Entry) -> Iterator[str]:
    yield f"### {entry.name}"
    yield ""
    yield "```text"
    yield entry.program.signature
    yield f"    {entry.formula}"
    yield "```"
    yield ""
    example = f" Example: `programs.{entry.call}`." if entry.is_factory else ""
    source = f" Source: {entry.source}." if entry.source else ""
    yield f"{entry.doc}{example}{source}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
