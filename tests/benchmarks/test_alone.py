"""Timings of several processes: while one times, the others stand still."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

COUNTING = """
import sys, time
import alone
alone.register()
with open(sys.argv[1], "w") as out:
    while True:
        out.write("."); out.flush()
        time.sleep(0.005)
"""
TIMING = """
import pathlib, sys, time
import alone
counter = pathlib.Path(sys.argv[1])
alone.register()
with alone.alone(), alone.alone():
    before = counter.stat().st_size
    time.sleep(0.4)
    print(counter.stat().st_size - before)
deadline = time.monotonic() + 20
while counter.stat().st_size <= before + 3 and time.monotonic() < deadline:
    time.sleep(0.02)
print(counter.stat().st_size - before)
"""


@pytest.fixture
def start(tmp_path):
    running = []
    environment = os.environ | {"CODETTA_ALONE": str(tmp_path / "alone"), "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = str(BENCHMARKS)

    def made(code, *arguments, **options):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        running.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **options)
        )
        return running[-1]

    yield made
    for process in running:
        process.kill()
        process.wait()


def counting(start, file):
    process = start(COUNTING, file)
    end = time.monotonic() + 60
    while not (file.exists() and file.stat().st_size > 2):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)
    return process


def test_others_stand_still_and_go_on(start, tmp_path):
    counting(start, tmp_path / "count")
    out, _ = start(TIMING, tmp_path / "count").communicate(timeout=90)
    during, after = map(int, out.split())
    assert during == 0 and after > 3


def test_who_has_ended_is_forgotten(start, tmp_path):
    gone = counting(start, tmp_path / "count")
    gone.kill()
    gone.wait()
    counting(start, tmp_path / "other")
    out, _ = start(TIMING, tmp_path / "other").communicate(timeout=90)
    assert out.split()[0] == "0"
    left = {int(f.name) for f in (tmp_path / "alone" / "processes").iterdir()}
    assert gone.pid not in left


def test_a_script_runs_as_by_itself(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import sys\nfrom measure import interleaved\n"
        "print(sys.argv[1:], __name__, hasattr(interleaved, '__wrapped__'))\n"
    )
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "alone.py"), str(script), "--out", "x"],
        capture_output=True, text=True, check=True, timeout=90,
        env=os.environ | {"CODETTA_ALONE": str(tmp_path / "alone")},
    )  # fmt: skip
    assert done.stdout.strip() == "['--out', 'x'] __main__ True"
