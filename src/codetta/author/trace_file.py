"""A script: execute an author's file and hand back the text of its programs, or what it raised.

Run by :func:`codetta.author.candidate.load_candidate` as ``python -I trace_file.py PATH``, with the
file's source on stdin. The answer is JSON on a descriptor of its own: {"task", "epilogues": {name:
text}, "chosen"} or {"raised": {"kind", "message", "where"}}.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
import traceback
from types import ModuleType
from typing import Any


def main() -> None:
    if os.environ["CODETTA_ROOT"] not in sys.path:
        sys.path.insert(0, os.environ["CODETTA_ROOT"])
    sys.path += [x for x in os.environ["CODETTA_PATH"].split(os.pathsep) if x not in sys.path]
    result = int(os.environ["CODETTA_RESULT_FD"])
    import codetta
    from codetta.author.guard import enter
    from codetta.errors import CodettaError
    from codetta.language.program import Program

    _ = codetta.epilogue, codetta.language, codetta.programs  # what a candidate needs of it
    path, source = sys.argv[1], sys.stdin.buffer.read()
    enter(int(os.environ["CODETTA_CPU_S"]))
    for name in [n for n in os.environ if n.startswith("CODETTA_")]:
        del os.environ[name]
    sys.argv = [path]
    try:
        answer = found(execute(path, source), Program)
    except BaseException as error:
        answer = {"raised": raised(error, path, CodettaError)}
    sys.stdout.flush()
    os.write(result, json.dumps(answer).encode())
    os._exit(0)  # no exit handlers of the candidate's


def execute(path: str, source: bytes) -> dict[str, Any]:
    """The names that the file binds. Errors and ``inspect`` read lines from the bytes given here,
    whatever becomes of the file."""
    module = ModuleType("candidate")
    module.__file__ = path
    sys.modules["candidate"] = module
    text = source.decode("utf-8", errors="replace")
    linecache.cache[path] = (len(source), None, text.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), module.__dict__)
    return module.__dict__


def found(names: dict[str, Any], kind: type) -> dict[str, Any]:
    """Programs by the name they are bound to; finalizers, which have no accumulator, do not count
    beside epilogues."""
    programs: dict[str, Any] = {}
    for name, value in names.items():
        if isinstance(value, kind) and name != "EPILOGUE" and value not in programs.values():
            programs[name] = value
    if len(programs) > 1:
        programs = {n: p for n, p in programs.items() if p.has_acc} or programs
    answer: dict[str, Any] = {"epilogues": {}}
    if "EPILOGUE" in names:
        chosen = names["EPILOGUE"]
        known = next((n for n, p in programs.items() if p is chosen), None)
        if isinstance(chosen, kind) and known is None:
            programs, known = {"EPILOGUE": chosen}, "EPILOGUE"
        answer["chosen"] = known or f"a {type(chosen).__name__}"
    answer["epilogues"] = {n: str(p) for n, p in programs.items()}
    task = names.get("TASK")
    answer["task"] = task if task is None or isinstance(task, str) else {"repr": repr(task)[:200]}
    return answer


def raised(error: BaseException, path: str, ours: type) -> dict[str, str]:
    """Class, message and the author's line of an exception."""
    message, where = str(error), getattr(error, "where", None) or ""
    if isinstance(error, ours):
        message = message.removesuffix(f"\n  at {where}")
    elif isinstance(error, SyntaxError):
        message = str(error.msg)
        where = f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    if not where:
        frames = traceback.extract_tb(error.__traceback__)
        mine = next((f for f in reversed(frames) if f.filename == path), None)
        where = f"{path}:{mine.lineno}: {(mine.line or '').strip()}" if mine else ""
    return {"kind": type(error).__name__, "message": message[:4000], "where": where[:500]}


if __name__ == "__main__":
    main()
