"""Each known way to look right or fast without being so is caught, and for its own reason.

A file's docstring ends in ``Caught by WHERE: WORDS``: the first stage that fails (for a foreign
kernel the guard), and what the reason says. The controls next to them show that what is caught is
the cheat.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from codetta.author.sandbox import run_foreign
from codetta.author.task import Workload, find
from codetta.author.verify import verify_candidate
from codetta.errors import UnknownTask

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's forward mode
FOLDER = Path(__file__).parent / "cheats"
TASK = find("bias_gelu_mask")
SIZES = (Workload(33, 24, 16, "float32"), Workload(19, 40, 16))
_WITH_GRADIENT = {"correct", "skipped_backward", "zero_backward"}
_TIMED = {"correct", "patched_clock", "rewired_clock"}


def files(route: str) -> list[Path]:
    return sorted((FOLDER / route).glob("*.py"))


def expected(path: Path) -> tuple[str, str]:
    """Where it is caught, and a part of the reason."""
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).splitlines()[-1]
    where, _, words = said.removeprefix("Caught by ").partition(": ")
    return where.rstrip(":"), words


def caught(path: Path) -> bool:
    return not expected(path)[0].startswith("nothing")


def test_the_corpus_is_large_and_has_its_controls():
    for route in ("epilogue", "foreign"):
        names = {p.stem for p in files(route)}
        assert {"correct", "wrong"} <= names
        assert len(names) >= 20
    assert sum(map(caught, [*files("epilogue"), *files("foreign")])) >= 40


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize("path", files("epilogue"), ids=lambda p: p.stem)
def test_epilogue(path):
    where, words = expected(path)
    if where == "use":
        with pytest.raises(UnknownTask, match=words):
            verify_candidate(path, seed=3, quick=True)
        return
    report = verify_candidate(path, seed=3, quick=True)
    failed = [s for s in report.stages if s.verdict == "failed"]
    if not caught(path):
        assert report.passed, failed
        return
    assert re.fullmatch(where, failed[0].name), failed[0]
    assert words in failed[0].reason
    assert report.exit_status == 1


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize("path", files("foreign"), ids=lambda p: p.stem)
def test_foreign(path):
    where, words = expected(path)
    ran = run_foreign(
        path,
        TASK,
        SIZES,
        seed=3,
        rounds=4 if path.stem in _TIMED else 0,
        gradient=path.stem in _WITH_GRADIENT,
        timeout_s=60,
    )
    if caught(path):
        assert not ran.passed
        (failed,) = ran.stages
        assert re.fullmatch(where, failed.facts["guard"]), failed
        assert words in failed.reason
        assert not ran.times_ms
        return
    assert ran.passed, ran.stages
    assert set(ran.times_ms) == {str(w) for w in SIZES}
    if path.stem == "patched_clock":  # its clock stands still, the harness's does not
        assert min(min(times) for times in ran.times_ms.values()) > 40
