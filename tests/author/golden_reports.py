"""The form of each command's JSON, for one task: names and types, no values.

python tests/author/golden_reports.py writes the files that test_golden.py compares with.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from codetta import Program
from codetta.author import bench, candidate, check, profile, verify
from codetta.author.isolation import Ended
from codetta.author.report import Report

HERE = Path(__file__).parent
FILES = HERE / "golden"
FILE = HERE / "solutions" / "layernorm_producer.py"
COMMANDS: dict[str, Callable[[], Report]] = {
    "check": lambda: check.check_candidate(FILE, compile=False),
    "verify": lambda: verify.verify_candidate(FILE, seed=1, quick=True, backend="reference"),
    "bench": lambda: bench.bench_candidate(FILE, seed=1),
    "profile": lambda: profile.profile_candidate(FILE, compile_kernel=False),
}
#: Objects whose names belong to the machine or to the task's operands.
_OPEN = ("environment", "MiB")


def made(command: str) -> dict[str, Any]:
    """The JSON of a command, on a file that is traced without a process of its own."""
    bound = runpy.run_path(str(FILE)).values()
    program = next(x for x in bound if isinstance(x, Program) and x.has_acc)
    answer = {"epilogues": {program.name: program.text}, "task": FILE.stem}
    ended = Ended(0, json.dumps(answer).encode(), "", False)
    with mock.patch.object(candidate, "run_isolated", lambda *_, **__: ended):
        found: dict[str, Any] = json.loads(COMMANDS[command]().model_dump_json())
    return found


def form(value: Any, name: str = "") -> Any:
    """Values by their types; names and verdicts of stages stay."""
    if isinstance(value, dict):
        if name in _OPEN:
            return "object"
        return {k: v if k in ("name", "verdict") else form(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [form(v) for v in value]
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}
    return kinds[type(value)]


def main() -> None:
    FILES.mkdir(exist_ok=True)
    for command in COMMANDS:
        text = json.dumps(form(made(command)), indent=1) + "\n"
        (FILES / f"{command}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
