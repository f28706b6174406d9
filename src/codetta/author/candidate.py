"""From an author's file to a Program, without trusting the file.

The file is executed in a process of its own (:mod:`codetta.author.isolation`), which hands back the
canonical text of the programs it traced; the text is parsed here. What is verified, timed and
recorded is that text. So a candidate has no way to keep outputs, look at the oracle or call
anything while it is being judged, and whatever it does to the ``codetta`` of its own process ends
with that process: the text must still be one that this ``codetta`` reads.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codetta.author.isolation import Ended, run_isolated
from codetta.author.task import Task, find
from codetta.errors import (
    BadTaskName,
    CandidateDied,
    CandidateError,
    CandidateRaised,
    CandidateTimeout,
    NoCandidateFile,
    NoEpilogue,
    NotWritten,
    ProgramTooLong,
    SeveralEpilogues,
    UnknownTask,
)
from codetta.language.meaning import NAMED_DTYPES
from codetta.language.program import Program
from codetta.language.trace import KINDS, check_name

_TRACER = Path(__file__).with_name("trace_file.py")
_LONGEST_SOURCE = 1 << 20  # bytes
_LONGEST_TEXT = 1 << 18
#: Nodes of a program. Solutions of the tasks have 27 at most; derivatives recurse into the depth.
LARGEST = 300
_SHOWN = 2000  # characters of what a candidate says


@dataclass(frozen=True)
class Candidate:
    """What an author's file comes down to.

    Attributes:
        path: of the file, as given.
        task: name of the task it says it solves (``TASK = "..."`` in the file), or "". The path of
            a task file is relative to the candidate's folder, and here joined to it.
        program: the Program, parsed from its canonical text.
        source_sha256: of the file's bytes.
        program_sha256: of the Program's canonical text; what a promotion is bound to.
        printed: what the file wrote to stdout and stderr, cut short.
    """

    path: Path
    task: str
    program: Program
    source_sha256: str
    program_sha256: str
    printed: str = ""


def load_candidate(path: str | Path, *, timeout_s: float = 60.0) -> Candidate:
    """Trace the epilogue of ``path`` in a fresh process.

    Raises:
        CandidateError: a subclass per mistake: no file, an exception while it ran (with its own
            line), no epilogue or several, more than ``timeout_s`` seconds, a process that ended
            by itself.
    """
    path = Path(path)
    try:
        source = path.read_bytes()
    except OSError as error:
        reason = "does not exist" if not path.exists() else f"cannot be read ({error.strerror})"
        raise NoCandidateFile(path=path, given=reason) from None
    if len(source) > _LONGEST_SOURCE:
        raise NoCandidateFile(path=path, given=f"has {len(source)} bytes, 1 MiB is the limit")
    ended = run_isolated([str(_TRACER), str(path)], source, timeout_s=timeout_s)
    answer = _answer(path, ended, timeout_s)
    if "raised" in answer:
        raise _raised(path, answer["raised"])
    program = _program(path, answer)
    return Candidate(
        path=path,
        task=_task(path, answer.get("task")),
        program=program,
        source_sha256=hashlib.sha256(source).hexdigest(),
        program_sha256=program.digest,
        printed=clean(ended.printed),
    )


def task_of(candidate: Candidate, given: str | Task | None = None) -> Task:
    """The task to judge a candidate by: ``given`` (a name, a path or a Task), else its own.

    Raises:
        UnknownTask: neither says one, there is none of that name, or the candidate names itself.
    """
    if isinstance(given, Task):
        return given
    wanted = given or candidate.task
    if not wanted:
        fix = f'unnamed: bind TASK = "NAME" in {candidate.path}, or give --task NAME'
        raise UnknownTask(name=f"({fix})", allowed="listed by `codetta new`")
    # A task is executed in this process, a candidate never is.
    if wanted.endswith(".py") and Path(wanted).resolve() == candidate.path.resolve():
        raise UnknownTask(
            name=f"in {wanted}: a candidate cannot be its own task",
            allowed="listed by `codetta new`",
        )
    return find(wanted)


def clean(text: str, limit: int = _SHOWN) -> str:
    """Foreign text for showing: no control characters, so no escapes for the terminal."""
    text = re.sub(r"[^\n\t\x20-\x7e\xa1-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]", "?", text)
    return text if len(text) <= limit else f"{text[:limit]} [...]"


# ------------------------------------------------------------------------- what came back
def _answer(path: Path, ended: Ended, timeout_s: float) -> dict[str, Any]:
    if ended.timed_out:
        raise CandidateTimeout(path=path, seconds=timeout_s)
    said = ended.printed.strip().splitlines()
    tail = f"; the last it printed is {clean(said[-1], 200)!r}" if said else ""
    if not ended.result:
        raise CandidateDied(path=path, given=_how(ended.status) + tail)
    try:
        answer = json.loads(ended.result)
        if isinstance(answer, dict) and ("raised" in answer or "epilogues" in answer):
            return answer
    except (ValueError, RecursionError):
        pass
    raise CandidateDied(path=path, given="what came back is no answer of the tracer" + tail)


def _how(status: int) -> str:
    if status >= 0:
        return f"it ended by itself with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    limit = {"SIGXCPU": ", its limit of processor time", "SIGKILL": ", perhaps for want of memory"}
    return f"it was ended by {name}{limit.get(name, '')}"


def _raised(path: Path, raised: Any) -> CandidateError:
    """The error of an exception in the file, with the author's line."""
    raised = raised if isinstance(raised, dict) else {}
    kind, message, where = (clean(str(raised.get(k) or "")) for k in ("kind", "message", "where"))
    at = where or None
    if kind == "NotImplementedError":
        return NotWritten(at, path=path)
    return CandidateRaised(at, path=path, error=kind, message=message or "(no message)")


def _program(path: Path, answer: dict[str, Any]) -> Program:
    """The one program of the answer, if this codetta can read it."""
    found, chosen = answer["epilogues"], answer.get("chosen")
    if not isinstance(found, dict):
        raise CandidateDied(path=path, given="what came back is no answer of the tracer")
    if isinstance(chosen, str) and chosen not in found:
        raise NoEpilogue(path=path, given=f"binds EPILOGUE to {clean(chosen, 100)}, no epilogue")
    names = [chosen] if isinstance(chosen, str) else list(found)
    if not names:
        raise NoEpilogue(path=path, given="defines no epilogue")
    if len(names) > 1:
        shown = clean(", ".join(map(str, names)), 300)
        raise SeveralEpilogues(path=path, count=len(names), names=shown, first=clean(names[0], 60))
    text = found[names[0]]
    try:
        program = Program.parse(text[:_LONGEST_TEXT])
        for what, name in (
            *(("operand", o.name) for o in program.operands),
            *(("output", o.name) for o in program.outputs if not program.bare),
        ):
            check_name(name, what, program.name, None)
        same = Program.parse(program.text).text == program.text == text
        known = all(o.kind.value in KINDS for o in program.operands)
        known &= all(
            o.dtype in NAMED_DTYPES or o.dtype in ("operand", "accumulator")
            for o in program.outputs
        )
    except Exception:  # a text that the tracer did not write can be wrong in any way
        same = known = False
    if not (same and known):
        raise CandidateDied(path=path, given="what came back is not the text of a program")
    if len(program.nodes) > LARGEST:
        raise ProgramTooLong(path=path, count=len(program.nodes), limit=LARGEST)
    return program


def _task(path: Path, given: Any) -> str:
    if given is None:
        return ""
    if not isinstance(given, str) or len(given) > 300 or "\n" in given:
        shown = given.get("repr", given) if isinstance(given, dict) else given
        raise BadTaskName(path=path, given=clean(str(shown), 100))
    return str(path.parent / given) if given.endswith(".py") else given
