"""Run the commands shown in docs/authoring.md and paste what they print: `python
tools/guide_outputs.py`, some two minutes.

A block that starts with ``$ codetta`` stands behind ``<!-- run: VERSION -->``, which says which
version of the walk-through's film.py the command is given.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "authoring.md"
RIGHT = "relu(scale * (acc + bias) + shift)"
_SHOWN = re.compile(r"<!-- run: (\w+) -->\n\n```\n\$ ([^\n]+)\n.*?```", re.DOTALL)
_WIDTH = 100


def versions(text: str) -> tuple[str, dict[str, str]]:
    """The walk-through's task file, and film.py by the name of its version."""
    path = text[text.index("## The path") : text.index("## The candidate")]
    task, wrong = re.findall(r"```python\n(.*?)```", path, re.DOTALL)
    formula = re.search(r"relu\(.*\)(?=})", wrong)
    assert formula is not None, "the walk-through returns no relu(...)"
    right = wrong.replace(formula[0], RIGHT)
    return task, {"wrong": wrong, "right": right, "kind": right.replace("shift: Row", "shift: Col")}


def page(text: str) -> str:
    """The page with every shown output made anew."""
    task, films = versions(text)

    def shown(found: re.Match[str]) -> str:
        version, command = found[1], found[2]
        with tempfile.TemporaryDirectory() as folder:
            for name, source in (("film_task.py", task), ("film.py", films[version])):
                Path(folder, name).write_text(source, encoding="utf-8")
            said = _run(command, folder).replace(folder, "~")
        return f"<!-- run: {version} -->\n\n```\n$ {command}\n{said}\n```"

    return _SHOWN.sub(shown, text)


def _run(command: str, folder: str) -> str:
    program = [sys.executable, "-c", "from codetta.cli import main; main()"]
    own = {"COLUMNS": str(_WIDTH), "CODETTA_CACHE_DIR": folder}
    done = subprocess.run(
        [*program, *command.split()[1:]],
        cwd=folder,
        env=os.environ | own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
