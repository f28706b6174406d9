"""What a language model is told: the guide, the task, what is near it, and then what came of it.

The guide is docs/authoring.md itself, so people and models learn from the same page, and a report
is shown to a model as it is printed for a person.
"""

from __future__ import annotations

import ast
import re
import textwrap
from io import StringIO

from rich.console import Console

from codetta.author.documents import mistakes, near, page
from codetta.author.render import render
from codetta.author.report import Report
from codetta.author.skeleton import skeleton
from codetta.author.task import find

_LONGEST_CODE = 1 << 16
_WIDTH = 110

_ROLE = """\
You write epilogues for CODA: short Python functions that are fused into a matrix product. You get \
one task. Answer with the whole file in one ```python block: imports, TASK, and one function \
decorated with @codetta.epilogue. Only that block is read; keep what you say outside of it short. \
The file is traced, checked, run against the task's formula in fp64 with fuzzed sizes, special \
values and gradients, and timed. If something is wrong you get the report and answer again, with \
the whole file. You cannot run anything yourself. The guide follows; it is all of the language.
"""
_AGAIN = "Answer with the whole file again, in one ```python block."


def system() -> str:
    """The rules and the guide."""
    return f"{_ROLE}\n{page()}\n{mistakes()}"


def task_text(name: str) -> str:
    """A task: the file to complete, and ready programs that are near it."""
    task = find(name)
    parts = [
        f"# Task {task.name}",
        "Complete this file.",
        fenced(skeleton(task, named=name if name.endswith(".py") else task.name)),
    ]
    if sources := near(task):
        parts += ["Ready programs near it, for their style:", *map(fenced, sources.values())]
    return "\n\n".join(parts)


def report_text(report: Report) -> str:
    """A report as it is printed, without colours."""
    console = Console(file=StringIO(), width=_WIDTH, color_system=None, highlight=False)
    console.print(render(report))
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def wrong(report: Report) -> str:
    """What is said after a command that failed."""
    return (
        f"`codetta {report.command}` failed:\n\n{fenced(report_text(report), 'text')}\n\n"
        f"Find what is wrong, mend it, and check the rest of your function against the task and "
        f"the guide. {_AGAIN}"
    )


def slow(report: Report, profile: Report | None, ratio: float, goal: float) -> str:
    """What is said after a program that is right, and not yet fast."""
    shown = [report_text(r) for r in (report, profile) if r is not None]
    return (
        f"It is right. It takes {ratio:.3f} x the plain product, and {goal} is the goal:\n\n"
        f"{fenced(chr(10).join(shown), 'text')}\n\n"
        f"Make it faster without changing what it computes: load and store less, use one kernel. "
        f"If you see no way, repeat your file as it is. {_AGAIN}"
    )


def unreadable(reason: str) -> str:
    """What is said after an answer without a file in it."""
    return f"There is no file to judge: {reason}. {_AGAIN}"


# ----------------------------------------------------------------------------- the answer
def code_of(text: str, cut: bool) -> tuple[str, str]:
    """(the file in an answer, ""), or ("", why there is none).

    Of several blocks the last with an epilogue counts: models quote before they write. Code
    without a fence is taken if all of the answer is code.

    Args:
        cut: whether the answer ended at the limit of tokens.
    """
    text = re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL).strip()
    if not text:
        ended = "; it was cut off at the limit of tokens before it said anything" if cut else ""
        return "", f"the answer is empty{ended}"
    blocks = _blocks(text, cut)
    written = [b for b in blocks if "@codetta.epilogue" in b or "@epilogue" in b] or blocks
    if written:
        code = textwrap.dedent(written[-1])  # a block in a list is indented
    elif cut:
        return "", "the answer was cut off at the limit of tokens; say less, and the code first"
    elif "epilogue" in text and _is_python(text):
        code = text
    else:
        return "", "the answer has no ```python block"
    if len(code.encode()) > _LONGEST_CODE:
        return "", f"the file has {len(code.encode())} bytes, and {_LONGEST_CODE} is the limit"
    return code.rstrip() + "\n", ""


def _blocks(text: str, cut: bool) -> list[str]:
    """What is between fences; the last fence may be missing, unless the answer was cut."""
    blocks: list[str] = []
    lines: list[str] = []
    fence = ""
    for line in text.splitlines():
        word = line.strip()
        if not fence:
            fence = word[: len(word) - len(word.lstrip("`"))]
            fence = fence if len(fence) >= 3 else ""
        elif word.startswith(fence) and not word.strip("`"):
            blocks.append("\n".join(lines))
            fence, lines = "", []
        else:
            lines.append(line)
    return blocks if cut or not fence else [*blocks, "\n".join(lines)]


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def fenced(text: str, language: str = "python") -> str:
    return f"```{language}\n{text.rstrip()}\n```"
