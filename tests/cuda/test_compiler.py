"""The process that compiles kernels may die or hang; the next kernel is compiled all the same."""

from __future__ import annotations

import pytest

from codetta.tuning.compile_only import Compiler, Job

#: Answers like the real worker, except that the packed form of some programs ends or stops it.
WORKER = """
import json, os, signal, sys, time

for line in sys.stdin:
    job = json.loads(line)
    bad = "always" in job["text"] or job["vectorize"]
    if bad and "crash" in job["text"]:
        os.kill(os.getpid(), signal.SIGSEGV)
    if bad and "hang" in job["text"]:
        time.sleep(600)
    error = {"error": "refused"} if bad and "refuse" in job["text"] else {}
    print(json.dumps({"pid": os.getpid()} | error), flush=True)
"""


@pytest.fixture
def compiler(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    compiler = Compiler("100", tmp_path, worker, patience_s=3)
    yield compiler
    compiler.close()


def job(text: str) -> Job:
    return Job(text, 1, 1, 1, "nt")


def test_one_process_compiles_one_kernel_after_the_other(compiler):
    first, second = compiler.compile(job("one")), compiler.compile(job("two"))
    assert first["packed"] and second["packed"]
    assert first["pid"] == second["pid"]


@pytest.mark.parametrize("how", ["crash", "hang", "refuse"])
def test_what_fails_packed_is_compiled_unpacked(compiler, how):
    made = compiler.compile(job(how))
    assert made.get("error") is None
    assert made["packed"] is False
    assert compiler.starts == (1 if how == "refuse" else 2)


def test_what_always_ends_the_process_is_reported_and_the_next_one_compiled(compiler):
    made = compiler.compile(job("always crash"))
    assert made["error"].startswith("the compiler died (-11)")
    assert compiler.compile(job("one")).get("error") is None
    assert compiler.starts == 3
