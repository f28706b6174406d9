"""`codetta mcp`, driven by a real client over stdio, and by one in this process."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("mcp")

from mcp import Client
from mcp.client.stdio import StdioServerParameters

from codetta.author import mcp as tools
from codetta.author.report import Report, Stage, Where
from codetta.author.task import names
from codetta.errors import UnknownTask, catalogue

HERE = Path(__file__).resolve().parent
TASK = "bias_gelu_mask"
RIGHT = (HERE / "solutions" / f"{TASK}.py").read_text()
WRONG = RIGHT.replace("gelu(acc + bias)", 'gelu(acc + bias, "tanh")')
LISTED = {
    "list_tasks", "task", "new", "programs", "language", "errors",
    "check", "verify", "bench", "profile", "promote",
}  # fmt: skip


def stdio(registry):
    env = {"CODETTA_REGISTRY": str(registry), "OMP_NUM_THREADS": "1"}
    return StdioServerParameters(command=sys.executable, args=MAIN, env=env)


MAIN = ["-c", "from codetta.cli import main; main()", "mcp"]


def in_process(*calls, task_files=(), progress=None):
    """The results of calls (tool, arguments) to a server in this process."""

    async def session():
        async with Client(tools.server(task_files)) as client:
            return [await client.call_tool(n, a, progress_callback=progress) for n, a in calls]

    return asyncio.run(session())


def text(result):
    return "\n".join(block.text for block in result.content)


def test_a_client_lists_tools_checks_verifies_and_reads_the_report(tmp_path):
    steps = []

    async def seen(done, total, message):
        steps.append(message)

    async def session():
        async with Client(stdio(tmp_path / "r.jsonl"), read_timeout_seconds=300) as client:
            listed = await client.list_tools()
            task = await client.call_tool("task", {"name": TASK})
            path = str(tmp_path / "right.py")
            Path(path).write_text(RIGHT)
            given = {"task": TASK, "path": path}
            checked = await client.call_tool("check", given)
            wrong = await client.call_tool("verify", {"task": TASK, "source": WRONG, "seed": 3})
            right = await client.call_tool(
                "verify", given | {"quick": True}, progress_callback=seen
            )
            return listed.tools, task, checked, wrong, right

    listed, task, checked, wrong, right = asyncio.run(session())
    assert {t.name for t in listed} == LISTED
    verify = next(t for t in listed if t.name == "verify")
    assert verify.input_schema["required"] == ["task"]
    assert "stages" in verify.output_schema["properties"]
    assert f'TASK = "{TASK}"' in task.structured_content["skeleton"]
    assert not any(r.is_error for r in (task, checked, wrong, right))

    report = Report.model_validate(checked.structured_content)
    assert report.command == "check" and report.passed
    assert "PASSED" in text(checked)

    report = Report.model_validate(wrong.structured_content)
    stage = next(s for s in report.stages if s.verdict == "failed")
    assert stage.name == "integers" and stage.where.tensor == "y" and report.seed == 3
    assert stage.worst[0].ratio > 1
    assert "--seed 3 --case integers/float32" in stage.replay
    for said in ("FAILED", "first: y[", "worst: y"):
        assert said in text(wrong)

    report = Report.model_validate(right.structured_content)
    assert report.passed and report.task == TASK
    assert any("fuzz" in m for m in steps)


def test_what_is_written_can_be_read():
    tasks, language, section, errors, error, programs, program, new = in_process(
        ("list_tasks", {}),
        ("language", {}),
        ("language", {"section": "Recipes"}),
        ("errors", {}),
        ("errors", {"name": "WidthMismatch"}),
        ("programs", {}),
        ("programs", {"name": "swiglu"}),
        ("new", {"name": TASK}),
    )
    assert [t["name"] for t in tasks.structured_content["result"]] == list(names())
    assert "## Twelve worked programs" in text(language)
    assert "codetta promote" not in text(language)
    assert text(section).startswith("## Recipes") and "| clamp to" in text(section)
    assert set(errors.structured_content) == {c.__name__ for c in catalogue()}
    assert "Tile(width=0.5)" in error.structured_content["WidthMismatch"]["right"]
    assert programs.structured_content["swiglu"]["formula"]
    assert "return silu(g) * u" in program.structured_content["swiglu"]["source"]
    assert "unpack" in program.structured_content["swiglu"]["program"]
    assert "raise NotImplementedError" in text(new)


def test_the_page_about_agents_lists_every_tool_with_its_arguments():
    page = (HERE.parents[1] / "docs" / "agents.md").read_text()

    async def session():
        async with Client(tools.server()) as client:
            return (await client.list_tools()).tools

    for tool in asyncio.run(session()):
        row = next(x for x in page.splitlines() if x.startswith(f"| `{tool.name}` |"))
        arguments = row.split("|")[2]
        assert set(re.findall(r"`(\w+)`", arguments)) == set(tool.input_schema["properties"])
        assert tool.description


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("task", {"name": "bias_gelu_mas"}, f"did you mean {TASK}"),
        ("check", {"task": "no_such", "source": RIGHT}, "there is no task"),
        ("check", {"task": TASK}, "either `source`"),
        ("check", {"task": TASK, "source": RIGHT, "path": "x.py"}, "either `source`"),
        ("check", {"task": TASK, "path": "/no/such.py"}, "does not exist"),
        ("bench", {"task": TASK, "path": "/no/such.py"}, "does not exist"),
        ("promote", {"task": "no_such", "source": RIGHT}, "there is no task"),
        ("programs", {"name": "swiglo"}, "did you mean swiglu"),
        ("errors", {"name": "Nonsense"}, "there is no error"),
        ("language", {"section": "Nonsense"}, "there is no section"),
        ("new", {"name": TASK, "path": "/no/such/folder/x.py"}, "cannot be written"),
    ],
)
def test_a_mistake_is_told_without_a_traceback(tool, arguments, said):
    (result,) = in_process((tool, arguments))
    assert result.is_error
    assert said in text(result)
    assert "Traceback" not in text(result)


def test_a_bug_of_ours_is_not_told_in_detail(monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("deep inside")

    monkeypatch.setattr(tools, "check_candidate", broken)
    (result,) = in_process(("check", {"task": TASK, "source": RIGHT}))
    assert result.is_error
    assert "deep inside" not in text(result) and "Traceback" not in text(result)


def test_a_file_is_written_once_and_never_over_another(tmp_path):
    path = str(tmp_path / "mine.py")
    first, second = in_process(*[("new", {"name": TASK, "path": path})] * 2)
    assert not first.is_error and second.is_error
    assert Path(path).read_text() == text(first)


def test_only_tasks_that_are_served_are_executed(tmp_path):
    marker = tmp_path / "marker"
    own = tmp_path / "own.py"
    source = (Path(tools.__file__).parent / "tasks" / f"{TASK}.py").read_text()
    own.write_text(source.replace(f'name="{TASK}"', 'name="own"'))
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(marker)!r}, 'w')\n{source}")
    assert 'name="own"' in own.read_text()
    candidate = RIGHT.replace(f'"{TASK}"', f'"{evil}"')
    refused, alone, listed, shown = in_process(
        ("check", {"task": str(evil), "source": RIGHT}),
        ("check", {"task": "own", "source": candidate}),
        ("list_tasks", {}),
        ("task", {"name": "own"}),
        task_files=[own],
    )
    assert refused.is_error and not alone.is_error
    assert alone.structured_content["task"] == "own"
    assert "own" in [t["name"] for t in listed.structured_content["result"]]
    assert not shown.is_error
    assert not marker.exists()
    with pytest.raises(UnknownTask):
        tools.server([tmp_path / "none.py"])


def test_what_is_not_a_number_arrives_as_a_word(monkeypatch):
    where = Where(tensor="y", tile=(0, 0), index=(1, 2), expected=float("nan"), got=float("inf"))
    stage = Stage(name="special", verdict="failed", reason="y is NaN", where=where)
    report = Report(command="verify", file="f.py", task=TASK, seed=1, stages=(stage,))
    monkeypatch.setattr(tools, "verify_candidate", lambda *a, **k: report)
    (result,) = in_process(("verify", {"task": TASK, "source": RIGHT}))
    assert result.structured_content["stages"][0]["where"]["expected"] == "NaN"
    assert json.dumps(result.structured_content, allow_nan=False)


def test_a_cancelled_call_stops_working(monkeypatch):
    started, ended = asyncio.Event(), []

    def endless(*args, progress, **kwargs):
        try:
            while True:
                progress("still at it")
                time.sleep(0.01)
        finally:
            ended.append(True)

    async def seen(done, total, message):
        started.set()

    async def session():
        async with Client(tools.server(), mode="legacy") as client:  # the one with cancelling
            call = asyncio.create_task(
                client.call_tool("check", {"task": TASK, "source": RIGHT}, progress_callback=seen)
            )
            await started.wait()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            while not ended:
                await asyncio.sleep(0.01)

    monkeypatch.setattr(tools, "check_candidate", endless)
    asyncio.run(asyncio.wait_for(session(), 60))
    assert ended == [True]


def test_arguments_reach_the_tools(monkeypatch):
    seen = {}

    def record(command):
        def tool(file, task, *, progress, **given):
            seen[command] = Path(file).read_text(), task, given
            stage = Stage(name="trace", verdict="passed")
            report = Report(command=command, file=str(file), task=task, stages=(stage,))
            return (report, None) if command == "promote" else report

        return tool

    for name in ("check", "verify", "bench", "profile"):
        monkeypatch.setattr(tools, f"{name}_candidate", record(name))
    monkeypatch.setattr(tools, "promotion", record("promote"))
    common = {"task": TASK, "source": RIGHT}
    results = in_process(
        ("check", common | {"compile": True}),
        ("verify", common | {"seed": 7, "case": "fuzz/3", "quick": True}),
        ("bench", common | {"seed": 7}),
        ("profile", common | {"compile": True}),
        ("promote", common | {"seed": 7}),
    )
    assert [r.structured_content["command"] for r in results] == list(seen)
    assert {(code, task) for code, task, _ in seen.values()} == {(RIGHT, TASK)}
    assert [given for *_, given in seen.values()] == [
        {"compile": True},
        {"seed": 7, "case": "fuzz/3", "quick": True},
        {"seed": 7},
        {"compile_kernel": True},
        {"seed": 7},
    ]
