"""A candidate's Python runs in a process of its own; nothing but the text of a program returns."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from codetta import Program, errors
from codetta.author.candidate import Candidate, _answer, _program, clean, load_candidate, task_of
from codetta.author.isolation import Ended, run_isolated
from codetta.author.trace_file import found, raised
from codetta.programs import catalog

SOURCE = """\
import codetta
from codetta.language import Row

@codetta.epilogue
def scaled(acc, r: Row):
    return {"y": acc * r}
"""


@pytest.fixture
def file(tmp_path):
    def write(source: str, name: str = "candidate.py") -> Path:
        path = tmp_path / name
        path.write_text(source, encoding="utf-8")
        return path

    return write


# ------------------------------------------------------------------------- what comes back
LOOKS_AROUND = (
    'import os, sys\nprint("\\x1b[2J\\u202e from", os.getcwd() == os.environ["HOME"],'
    ' os.listdir(), sorted(k for k in os.environ if "SECRET" in k or k.startswith("CODETTA")))\n'
    'TASK = "folder/task.py"\n'
)


def test_a_file_becomes_its_program_in_an_empty_place(file, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "1")
    path = file(LOOKS_AROUND + SOURCE)
    candidate = load_candidate(path)
    assert candidate.program.signature == "scaled(acc, r: Row) -> y"
    assert candidate.program_sha256 == candidate.program.digest
    assert candidate.source_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert candidate.task == str(path.parent / "folder" / "task.py")
    assert candidate.printed == "?[2J? from True [] []\n"  # no escapes, no secrets


def test_files_beside_it_shadow_nothing(file):
    for name in ("codetta.py", "torch.py", "json.py"):
        file("raise SystemExit('shadowed')", name)
    assert load_candidate(file(SOURCE)).program.name == "scaled"


def test_what_it_does_to_its_own_codetta_stays_there(file):
    patch = (
        "import codetta.language.text as text\nfrom codetta.language.program import Program\n"
        "lines = ['program f(acc) {', '  %0 = evil', '  store y: operand = %0', '}']\n"
        "text.format_program = lambda p: '\\n'.join(lines)\n"
        "text.PRIMITIVES['evil'] = text.PRIMITIVES['acc']\n"
    )
    with pytest.raises(errors.CandidateDied, match="is not the text of a program"):
        load_candidate(file(patch + SOURCE))
    assert "evil" not in str(Program.parse(str(catalog()["identity"].program)))


FORGES = """\
import os
for fd in range(3, 64):
    try:
        os.write(fd, b"{ not json")
    except OSError:
        pass
os._exit(0)
"""


def test_what_it_writes_itself_is_no_program(file):
    with pytest.raises(errors.CandidateDied, match="no answer of the tracer"):
        load_candidate(file(FORGES))


def test_a_missing_or_huge_file_is_said_to_be_so(file, tmp_path):
    with pytest.raises(errors.NoCandidateFile, match="does not exist"):
        load_candidate(tmp_path / "none.py")
    with pytest.raises(errors.NoCandidateFile, match="1 MiB is the limit"):
        load_candidate(file("#" * (1 << 20) + "\n"))
    with pytest.raises(errors.NoCandidateFile, match="cannot be read"):
        load_candidate(tmp_path)


# ------------------------------------------------------- a text that the tracer did not write
GOOD = """\
program f(acc, r: Row) {
  %0 = acc
  %1 = operand(name=r)
  %2 = mul(%0, %1)
  return result: operand = %2
}"""
HOSTILE = {
    "no text": 7,
    "nothing": "",
    "another dtype": GOOD.replace("operand = %2", "int4 = %2"),
    "another kind": GOOD.replace("r: Row", "r: Partial"),
    "not canonical": GOOD.replace("%2 = mul(%0, %1)", "%2 =  mul(%0, %1)"),
    "dead node": GOOD.replace("  return", "  %3 = exp(%0)\n  return"),
    "wrong arity": GOOD.replace("mul(%0, %1)", "mul(%0)"),
    "unknown operand": GOOD.replace("name=r", "name=s"),
    "division by zero": GOOD.replace("r: Row", "r: Row(width=1/0)"),
    "too long": GOOD + "\n" * (1 << 18) + "}",
    "reserved name": GOOD.replace("r: Row", "d_r: Row").replace("name=r", "name=d_r"),
    "a list": [GOOD],
}


def test_the_text_that_the_hostile_ones_are_made_of_is_right():
    assert _program(Path("x.py"), {"epilogues": {"f": GOOD}}).text == GOOD


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_forged_text_is_refused(text):
    with pytest.raises(errors.CandidateDied, match="not the text of a program"):
        _program(Path("x.py"), {"epilogues": {"f": text}})


@pytest.mark.parametrize("answer", [b"[1]", b"{}", b"[" * 100_000, b'{"epilogues": []}', b"\xff"])
def test_a_forged_answer_is_refused(answer):
    with pytest.raises(errors.CandidateDied, match="no answer of the tracer"):
        _program(Path("x.py"), _answer(Path("x.py"), Ended(0, answer, "", False), 1.0))


@pytest.mark.parametrize(
    "status, how",
    [(3, "exit status 3"), (-signal.SIGSEGV, "SIGSEGV"), (-signal.SIGKILL, "want of memory")],
)
def test_how_a_process_ended_is_told(status, how):
    with pytest.raises(errors.CandidateDied, match=f"{how}.*the last it printed is 'b'"):
        _answer(Path("x.py"), Ended(status, b"", "a\nb\n", False), 1.0)


def test_foreign_text_cannot_steer_a_terminal():
    assert clean("a\x1b[31m\x07\r\x9b\u202eb\tc\né") == "a?[31m????b\tc\né"
    assert clean("x" * 50, 10) == "x" * 10 + " [...]"


# -------------------------------------------------------------------------- which program
PROGRAMS = {name: catalog()[name].program for name in ("identity", "relu_squared")}


def test_the_one_epilogue_is_found_among_others():
    names = {"a": PROGRAMS["relu_squared"], "again": PROGRAMS["relu_squared"], "x": 3}
    assert list(found(names, Program)["epilogues"]) == ["a"]
    both = names | {"b": PROGRAMS["identity"]}
    assert list(found(both, Program)["epilogues"]) == ["a", "b"]
    assert found(both | {"EPILOGUE": PROGRAMS["identity"]}, Program)["chosen"] == "b"


def test_an_epilogue_bound_to_nothing_else_counts():
    answer = found({"EPILOGUE": PROGRAMS["relu_squared"]}, Program)
    assert answer["chosen"] == "EPILOGUE"
    assert _program(Path("x.py"), answer) == PROGRAMS["relu_squared"]


def test_an_epilogue_that_is_none_is_refused():
    answer = found({"EPILOGUE": len, "f": PROGRAMS["relu_squared"]}, Program)
    with pytest.raises(errors.NoEpilogue, match="binds EPILOGUE to a builtin_function_or_method"):
        _program(Path("x.py"), answer)


def test_an_error_comes_with_the_line_of_the_author():
    source = "\n\ndef f():\n    return 1 / 0\n\nf()\n"
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile(source, "my.py", "exec"), {})
    said = raised(caught.value, "my.py", errors.CodettaError)
    assert (said["kind"], said["message"]) == ("ZeroDivisionError", "division by zero")
    assert said["where"].startswith("my.py:4:")


# ---------------------------------------------------------------------------- which task
def candidate_for(task: str, path: str = "x.py") -> Candidate:
    return Candidate(Path(path), task, PROGRAMS["relu_squared"], "", "")


def test_the_task_is_the_given_one_or_the_files_own():
    assert task_of(candidate_for("mish")).name == "mish"
    assert task_of(candidate_for("mish"), "lora_add").name == "lora_add"
    with pytest.raises(errors.UnknownTask, match="--task NAME"):
        task_of(candidate_for(""))


def test_a_candidate_is_not_executed_as_its_own_task(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("raise SystemExit('executed')")
    with pytest.raises(errors.UnknownTask, match="cannot be its own task"):
        task_of(candidate_for(str(tmp_path / ".." / tmp_path.name / "x.py"), str(path)))


# -------------------------------------------------------------------------- the process
def isolated(tmp_path: Path, script: str, timeout_s: float = 20.0) -> Ended:
    """A script without torch, so that it starts at once; {ROOT} makes codetta importable."""
    path = tmp_path / "script.py"
    path.write_text("import os, sys\nsys.path.insert(0, os.environ['CODETTA_ROOT'])\n" + script)
    return run_isolated([str(path)], b"given", timeout_s=timeout_s)


def test_input_answer_and_prints_have_ways_of_their_own(tmp_path):
    ended = isolated(
        tmp_path,
        "print('out'); print('err', file=sys.stderr)\n"
        "os.write(int(os.environ['CODETTA_RESULT_FD']), sys.stdin.buffer.read() + b'!')\n"
        "sys.exit(4)\n",
    )
    assert ended == Ended(4, b"given!", "out\nerr\n", False)


def test_a_process_that_outlives_its_time_is_killed_with_its_children(tmp_path):
    script = (
        "import time\nchild = os.fork()\n"
        "if child: os.write(int(os.environ['CODETTA_RESULT_FD']), str(child).encode())\n"
        "time.sleep(600)\n"
    )
    ended = isolated(tmp_path, script, timeout_s=1.0)
    assert ended.timed_out and ended.status == -signal.SIGKILL
    assert gone(int(ended.result))


def test_a_child_left_behind_neither_delays_nor_survives(tmp_path):
    script = (
        "import time\nchild = os.fork()\n"
        "if not child: time.sleep(600)\n"
        "os.write(int(os.environ['CODETTA_RESULT_FD']), str(child).encode())\n"
    )
    ended = isolated(tmp_path, script)
    assert not ended.timed_out and ended.status == 0
    assert gone(int(ended.result))


def gone(pid: int) -> bool:
    """Whether a process has ended, within a while (it may be waiting for its parent to notice)."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat")
            if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


TRIES = """
import json, subprocess, socket
from codetta.author.guard import enter
outside, home = sys.argv[0], os.getcwd()
enter(30)
def refused(*args):
    try:
        args[0](*args[1:])
    except PermissionError as error:
        return type(error).__name__ == "Refused"
    except OSError:
        return False
    return False
found = {
    "fork": refused(os.fork),
    "system": refused(os.system, "true"),
    "subprocess": refused(subprocess.run, ["true"]),
    "exec": refused(os.execv, "/bin/true", ["true"]),
    "kill": refused(os.kill, os.getppid(), 0),
    "connect": refused(socket.create_connection, ("127.0.0.1", 9), 1),
    "write": refused(open, outside, "a"),
    "create": refused(os.open, outside + ".new", os.O_CREAT | os.O_WRONLY),
    "remove": refused(os.remove, outside),
    "rename": refused(os.rename, outside, home + "/x"),
    "mkdir": refused(os.mkdir, outside + ".d"),
    "symlink out": refused(os.symlink, outside, home + "/link"),
}
open(outside).read()  # reading is allowed, and so is writing here
open(home + "/note", "w").write("x"); os.remove(home + "/note")
os.write(int(os.environ["CODETTA_RESULT_FD"]), json.dumps(found).encode())
"""


def test_a_candidate_leaves_nothing_outside_of_its_folder(tmp_path):
    ended = isolated(tmp_path, TRIES)
    assert ended.status == 0, ended.printed
    assert [name for name, refused in json.loads(ended.result).items() if not refused] == []
    assert [x.name for x in tmp_path.iterdir()] == ["script.py"]


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
@pytest.mark.parametrize(
    "line, ends",
    [
        ("x = bytearray(8 << 30)", "MemoryError"),
        ("os.write(1, b'x' * (32 << 20)); os.write(1, b'x')", "File too large"),
    ],
)
def test_memory_and_output_are_limited(tmp_path, line, ends):
    ended = isolated(tmp_path, f"from codetta.author.guard import enter\nenter(30)\n{line}\n")
    assert ended.status != 0 and len(ended.printed) <= 1 << 20
    assert ends in ended.printed or "x" * 100 in ended.printed


def test_processor_time_is_limited(tmp_path):
    script = "from codetta.author.guard import enter\nenter(1)\nwhile True: pass\n"
    ended = isolated(tmp_path, script)
    assert not ended.timed_out
    assert ended.status in (-signal.SIGXCPU, -signal.SIGKILL)
