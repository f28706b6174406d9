"""`codetta new`: a file that says what the task wants, and is valid but for the program."""

from __future__ import annotations

import ast
import json
import runpy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from codetta import Program, cli, language
from codetta.author.skeleton import skeleton
from codetta.author.task import find, names

SOLUTIONS = Path(__file__).parent / "solutions"


def run(*arguments: str):
    return CliRunner().invoke(cli.app, ["new", *arguments])


def solution(name: str) -> Program:
    bound = runpy.run_path(str(SOLUTIONS / f"{name}.py")).values()
    return next(x for x in bound if isinstance(x, Program) and x.has_acc)


@pytest.mark.parametrize("name", names())
def test_a_skeleton_declares_what_a_solution_needs_and_lacks_only_the_program(name, tmp_path):
    task, text = find(name), skeleton(name)
    assert max(map(len, text.splitlines())) <= 100
    body = ast.parse(text).body
    assert ast.get_docstring(ast.parse(text), clean=False).startswith(f"{task.title}.\n")
    assert all(line in text for line in task.formula.splitlines())
    assert f'TASK = "{name}"' in text

    arguments = body[-1].args.args[1:]
    kinds = {x.arg: eval(ast.unparse(x.annotation), vars(language)) for x in arguments}
    wanted = {o.name: (o.kind, o.width) for o in solution(name).operands}
    assert {n: (k.kind, k.width) for n, k in kinds.items()} == wanted

    path = tmp_path / "skeleton.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(NotImplementedError):
        runpy.run_path(str(path))


def test_a_dtype_that_is_not_the_usual_one_is_written_out():
    text = skeleton("row_amax_fp8")
    assert "from codetta.language import Scalar, Tile, store" in text
    assert 'return {"x": ..., "q": store(..., "e4m3"), "amax": ...}' in text


def test_constants_of_the_formula_are_there_to_be_used():
    assert "LIMIT = 2.0\nSLOPE = 1.702" in skeleton("clamped_swiglu")


def test_it_writes_a_file_and_never_over_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("mish").exit_code == 0
    assert Path("mish.py").read_text() == skeleton("mish", file="mish.py")
    Path("mish.py").write_text("mine")
    again = run("mish")
    assert again.exit_code == 2 and "exists" in again.output
    assert Path("mish.py").read_text() == "mine"
    nowhere = run("mish", "-o", "no/such/folder.py")
    assert nowhere.exit_code == 2 and "cannot be written" in nowhere.output


def test_a_task_file_is_named_from_where_the_candidate_lies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tasks").mkdir()
    Path("mine").mkdir()
    source = Path(find.__code__.co_filename).parent / "tasks" / "mish.py"
    Path("tasks/own.py").write_text(source.read_text())
    assert run("tasks/own.py", "-o", "mine/try.py").exit_code == 0
    assert 'TASK = "../tasks/own.py"' in Path("mine/try.py").read_text()


def test_the_tasks_are_listed_by_level():
    lines = [line.strip() for line in run().output.splitlines()]
    assert [x for x in lines if x in ("easy", "medium", "hard")] == ["easy", "medium", "hard"]
    listed = json.loads(run("--json").output)
    assert [t["name"] for t in listed] == list(names())
    assert all(any(line.startswith(t["name"]) for line in lines) for t in listed)


def test_one_task_as_json_says_everything_an_author_needs():
    said = json.loads(run("gated_residual", "--json").output)
    assert said["skeleton"] == skeleton("gated_residual")
    task = find("gated_residual")
    assert [o["name"] for o in said["operands"]] == [o.name for o in task.operands]
    assert said["formula"] == task.formula


def test_an_unknown_task_is_a_wrong_use():
    result = run("no_such_task")
    assert result.exit_code == 2
    assert "there is no task no_such_task" in result.output and "mish" in result.output
