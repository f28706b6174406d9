"""The author tools: tasks, cases, and the files that are judged."""

from __future__ import annotations

from typing import ClassVar

from codetta.errors.base import CodettaError


class CandidateError(CodettaError):
    """A file given to ``codetta check`` and the other author tools holds no program to judge.

    The examples below are such files.
    """

    examples_are_files: ClassVar[bool] = True


_GOOD = """\
import codetta
from codetta.language import Row, gelu


@codetta.epilogue
def bias_gelu(acc, bias: Row):
    return gelu(acc + bias)"""


class UnknownTask(CandidateError, LookupError):
    template = "there is no task {name}. Tasks are {allowed}; or give the path of a task file."
    wrong = "from codetta.author.task import find\nfind('no_such_task')"
    right = "from codetta.author.task import names\nassert 'no_such_task' not in names()"
    examples_are_files = False


class UnknownCase(CandidateError, LookupError):
    template = (
        "task {task} has no case {case!r} under this seed. Stages are {stages}; a failed stage of "
        "`codetta verify` prints the seed and the name of its case."
    )
    wrong = (
        "from codetta.author.cases import named_case\n"
        "from codetta.author.task import find\n"
        "named_case(find('bias_gelu_mask'), 0, 'fuzz/999')"
    )
    right = (
        "from codetta.author.cases import named_case\n"
        "from codetta.author.task import find\n"
        "named_case(find('bias_gelu_mask'), 0, 'fuzz/00')"
    )
    examples_are_files = False


class NoCandidateFile(CandidateError, LookupError):
    template = (
        "{path} {given}. `codetta new TASK -o FILE` writes a file to start from, and "
        "`codetta new` lists the tasks."
    )
    wrong = "from codetta.author.candidate import load_candidate\nload_candidate('no/such/file.py')"
    right = "from codetta.author.skeleton import skeleton"
    examples_are_files = False


class BadTaskName(CandidateError, TypeError):
    template = (
        "TASK of {path} is {given}. Bind it to the name of a task, such as "
        'TASK = "bias_gelu_mask", or to the path of a task file, or leave it out and give --task.'
    )
    wrong = f"TASK = 3\n{_GOOD}"
    right = f'TASK = "bias_gelu_mask"\n{_GOOD}'


class NoEpilogue(CandidateError, ValueError):
    template = (
        "{path} {given}. Define one function `def NAME(acc, ...)` decorated with "
        "@codetta.epilogue at the top level of the file."
    )
    wrong = _GOOD.replace("@codetta.epilogue\n", "")
    right = _GOOD


class SeveralEpilogues(CandidateError, ValueError):
    template = (
        "{path} defines {count} epilogues: {names}. Only one is judged: bind `EPILOGUE = {first}` "
        "(or another) at the top level of the file, or delete the others."
    )
    wrong = (
        f"{_GOOD}\n\n\n@codetta.epilogue\ndef bias_alone(acc, bias: Row):\n    return acc + bias"
    )
    right = f"{wrong}\n\n\nEPILOGUE = bias_gelu"


class ProgramTooLong(CandidateError, ValueError):
    template = (
        "{path} makes a program of {count} nodes; {limit} is the limit. Loops are unrolled while "
        "the function is traced: write fewer turns, or a closed form."
    )
    wrong = _GOOD.replace(
        "    return gelu(acc + bias)",
        "    x = acc\n    for i in range(400):\n        x = x + bias\n    return x",
    )
    right = _GOOD


class NotWritten(CandidateError, RuntimeError):
    template = (
        "{path} is not written yet: it raises NotImplementedError. Put the program in place of "
        "that line, and return its outputs by name."
    )
    wrong = _GOOD.replace("return gelu(acc + bias)", "raise NotImplementedError")
    right = _GOOD


class CandidateRaised(CandidateError, RuntimeError):
    template = "{path} cannot be traced. {error}: {message}"
    wrong = _GOOD.replace("bias: Row", "bias")
    right = _GOOD


class CandidateTimeout(CandidateError, RuntimeError):
    template = (
        "{path} was still running after {seconds:g} s. It is traced once, without data, which "
        "takes milliseconds: do no work at the top level of the file, and let loops end."
    )
    wrong = f"import time\n\ntime.sleep(3600)\n{_GOOD}"
    right = _GOOD


class CandidateDied(CandidateError, RuntimeError):
    template = (
        "{path} was executed in a process of its own, which handed back no program: {given}. A "
        "candidate defines an epilogue and nothing else: no exit, no processes, no files."
    )
    wrong = f"import os\n\n{_GOOD}\n\n\nos._exit(3)"
    right = _GOOD
