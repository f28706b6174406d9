"""benchmarks/author_tasks.py: it goes on where it stopped, and its table has every size."""

import json

import author_tasks
import pytest
import torch

import codetta
from codetta.author import bench
from codetta.author.contenders import on_meta
from codetta.author.task import find, names


@pytest.fixture
def solutions(monkeypatch):
    """No file is traced; each task has a program that stands for its solution."""

    @codetta.epilogue
    def stand_in(acc):
        return {"y": acc}

    asked = []

    def programs(wanted):
        asked.append(wanted)
        return dict.fromkeys(wanted, stand_in)

    monkeypatch.setattr(author_tasks, "programs", programs)
    monkeypatch.setattr(bench, "no_gpu", lambda: "there is no CUDA device")
    monkeypatch.setattr(author_tasks, "no_gpu", lambda: "there is no CUDA device")
    return asked


def test_every_task_has_a_solution():
    assert {p.stem for p in author_tasks.SOLUTIONS.glob("*.py")} >= set(names())


def test_it_resumes_and_tabulates(solutions, tmp_path, capsys):
    run = ["--out", str(tmp_path), "--task", "mish", "--task", "swish_beta"]
    author_tasks.main([*run, "--budget", "0"])  # the first is never left out
    assert "1 tasks are left" in capsys.readouterr().out
    (tmp_path / "author_swish_beta.json").unlink(missing_ok=True)
    author_tasks.main(run)
    assert solutions == [["mish", "swish_beta"], ["swish_beta"]]
    rows = capsys.readouterr().out.splitlines()
    sizes = [(n, str(w)) for n in ("mish", "swish_beta") for w in find(n).benchmark]
    assert len(rows) == 1 + len(sizes)
    for row, (name, size) in zip(rows[1:], sizes, strict=True):
        assert row.startswith(name) and size in row and row.endswith("estimate")
    data = json.loads((tmp_path / "author_mish.json").read_text())
    assert data["stages"][0]["facts"]["candidate_ms"] > 0 and data["environment"]["date"]


def test_arrays_without_memory_have_the_layout_that_is_timed():
    for name in names():
        task = find(name)
        a, b, operands = on_meta(task, task.benchmark[0])
        assert (a.stride(1), b.stride(0)) == (1, 1) and a.shape[1] == b.shape[0]
        assert list(operands) == [o.name for o in task.operands]
        made = task.reference(torch.empty(a.shape[0], b.shape[1], device="meta"), **operands)
        assert set(made) == {o.name for o in task.outputs}
