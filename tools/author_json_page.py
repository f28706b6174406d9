"""Write the table of fields into docs/author-json.md: `python tools/author_json_page.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from codetta.author.report import Report, Stage, TensorError, Where

PAGE = Path(__file__).resolve().parent.parent / "docs" / "author-json.md"
BEGIN, END = "<!-- fields: begin -->", "<!-- fields: end -->"
_BLOCK = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
_TITLES: dict[type[BaseModel], str] = {
    Report: "Report", Stage: "Stage", Where: "Where", TensorError: "TensorError",
}  # fmt: skip


def tables() -> str:
    """One table per model, from the schema that pydantic makes."""
    parts = []
    for model, title in _TITLES.items():
        schema = model.model_json_schema(mode="serialization")
        parts += [f"### {title}", "", schema["description"], ""]
        parts += ["| field | type | meaning |", "|---|---|---|"]
        for name, field in schema["properties"].items():
            meaning = " ".join(field["description"].split())
            parts.append(f"| `{name}` | {_type(field)} | {meaning} |")
        parts.append("")
    return "\n".join(parts).rstrip()


def page(text: str) -> str:
    """The page's text with the tables between its markers brought up to date."""
    return _BLOCK.sub(lambda _: f"{BEGIN}\n\n{tables()}\n\n{END}", text)


def _type(field: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if "enum" in field:
        return ", ".join(f'`"{x}"`' for x in field["enum"])
    if "anyOf" in field:
        return " or ".join(_type(x) for x in field["anyOf"])
    if field["type"] == "array":
        return f"array of {_type(field['items'])}"
    inside = field.get("additionalProperties")
    if isinstance(inside, dict):
        return f"object of {_type(inside)}"
    return str(field["type"])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
