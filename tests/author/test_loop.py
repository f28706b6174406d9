"""The loop against a server that replays answers: right, wrong, cheating, slow and broken ones."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("openai")

from codetta.author import loop, prompt
from codetta.author.client import Endpoint, Model, endpoint
from codetta.author.judgement import Judgement
from codetta.author.report import Report, Stage
from codetta.author.trace import Trace
from codetta.cli import app
from codetta.errors import EndpointFailed, NoEndpoint

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from replay_server import Fails, Garbles, Hangs, Says, replay  # noqa: E402

TASK = "bias_gelu_mask"
RIGHT = (HERE / "solutions" / f"{TASK}.py").read_text()
BARE = "import codetta\n\n\n@codetta.epilogue\ndef f(acc):\n    return acc"
KEY = "sk-a-secret-that-is-written-nowhere"


def fenced(code, before="Here it is.\n"):
    return f"{before}\n```python\n{code}```\nDone."


def author(server, folder, *more):
    """`codetta author` with this server as its endpoint."""
    arguments = ["author", TASK, "--model", "m", "--out", str(folder), "--seed", "5", *more]
    return command(server, arguments)


def command(server, arguments):
    env = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": KEY}
    return CliRunner().invoke(app, arguments, env=env)


def lines(folder):
    return [json.loads(x) for x in (folder / "trace.jsonl").read_text().splitlines()]


def judged_by(code, passes=("right",), ratio=1.0, outcome="verify"):
    """A stand-in for the tools, for tests of what is around them."""
    passed = any(word in code for word in passes)
    verdict = "passed" if passed else "failed"
    stage = Stage(name="fuzz", verdict=verdict, reason="" if passed else "off by a mile")
    report = Report(command="verify", file="f", task=TASK, stages=(stage,))
    sha = hashlib.sha256(code.encode()).hexdigest()
    if passed:
        return Judgement("passed", "faster, please", "", ratio, sha, (report,))
    return Judgement(outcome, "mend it", "fuzz: off by a mile", None, sha, (report,))


def run(server, folder, limits=None, judge=None, **model):
    """The loop with a stand-in for the tools."""
    trace = Trace.resume(folder) if (folder / "trace.jsonl").exists() else None
    trace = trace or loop.begin(folder, TASK, "m", server.url, 5)
    made = Model(Endpoint(server.url, KEY), "m", **{"pause_s": 0.01, "attempts": 4, **model})
    judge = judge or (lambda path, task, seed: judged_by(path.read_text()))
    return loop.run(made, trace, limits or loop.Limits(), judge=judge)


# ----------------------------------------------------------------------- with the real tools
def test_a_wrong_answer_is_mended_after_its_report(tmp_path):
    folder = tmp_path / "run"
    wrong = RIGHT.replace("gelu(acc + bias)", 'gelu(acc + bias, "tanh")')
    assert wrong != RIGHT
    with replay(Says(fenced(wrong)), Says(fenced(RIGHT))) as server:
        result = author(server, folder, "--max-tokens", "700", "--json")
        asked = server.requests
    assert result.exit_code == 0, result.output
    start, _, answer, failed, _, passed, stop = lines(folder)
    assert [failed["outcome"], passed["outcome"], stop["stop"]] == ["verify", "passed", "fast"]
    # What was asked: guide and task, then the whole report with a way to see the error.
    assert len(asked) == 2
    assert {r["key"] for r in asked} == {f"Bearer {KEY}"}
    assert {(r["model"], r["max_tokens"]) for r in asked} == {("m", 700)}
    assert "## The language on one page" in asked[0]["messages"][0]["content"]
    assert "class" not in asked[0]["messages"][1]["content"]
    assert f'TASK = "{TASK}"' in asked[0]["messages"][1]["content"]
    assert [m["role"] for m in asked[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert asked[1]["messages"][2]["content"] == fenced(wrong)
    feedback = asked[1]["messages"][3]["content"]
    for said in ("FAILED", "first: y[", "worst: y", "--seed", "--case", "Answer with the whole"):
        assert said in feedback
    # What is kept: everything, and no secret.
    assert answer["text"] == fenced(wrong) and answer["usage"]["completion"] == 20
    assert answer["prompt_sha256"] == loop.sha256(json.dumps(asked[0]["messages"]))
    assert [r["command"] for r in failed["reports"]] == ["check", "verify"]
    reports = [Report.model_validate(r) for r in passed["reports"]]
    assert [(r.command, r.passed) for r in reports][:3] == [
        ("check", True), ("verify", True), ("bench", True)
    ]  # fmt: skip
    assert reports[1].seed == start["seed"] + 2
    assert (folder / "best.py").read_text() == RIGHT == (folder / "rounds" / "002.py").read_text()
    assert (folder / "rounds" / "001.py").read_text() == wrong
    summary = json.loads((folder / "summary.json").read_text())
    assert json.loads(result.stdout) == summary
    assert summary["best"]["round"] == 2 and not summary["verified_at_first_verify"]
    assert summary["best"]["code_sha256"] == hashlib.sha256(RIGHT.encode()).hexdigest()
    assert summary["tokens"] == {"prompt": 200, "completion": 40, "total": 240}
    assert KEY not in "".join(p.read_text() for p in folder.rglob("*") if p.is_file())
    assert KEY not in result.output


def test_cheats_and_mistakes_are_refused_each_for_its_reason(tmp_path):
    folder, marker = tmp_path / "run", tmp_path / "marker"
    epilogue = RIGHT[RIGHT.index("@codetta.epilogue") :]
    answers = {
        "SyntaxError": RIGHT.replace("return {", "return {{"),
        "ForeignFunction": RIGHT.replace("gelu(acc + bias)", "torch.matmul(acc, bias)").replace(
            "import codetta\n", "import codetta\nimport torch\n"
        ),
        # The guard says what is refused; whatever it says, nothing is written.
        "marker": RIGHT.replace(
            epilogue,
            "import codetta.author.loop as loop\nloop.GOAL = 1e9\n"
            f"open({str(marker)!r}, 'w').write('here')\n\n\n{epilogue}",
        ),
    }
    with replay(*(Says(fenced(code)) for code in answers.values())) as server:
        result = author(server, folder, "--rounds", "3", "--until", "verified")
    assert result.exit_code == 1, result.output
    verdicts = [e for e in lines(folder) if e["kind"] == "verdict"]
    assert [e["outcome"] for e in verdicts] == ["check"] * 3
    assert "SyntaxError" in verdicts[0]["reason"]
    assert "ForeignFunction" in verdicts[1]["reason"]
    assert not marker.exists()
    assert loop.GOAL == 1.08
    assert not (folder / "best.py").exists()
    assert "NOT SOLVED" in result.stdout and "all rounds are used" in result.stdout
    assert json.loads((folder / "summary.json").read_text())["best"] is None


# ------------------------------------------------------------------------ what a model is told
def test_a_model_is_told_the_language_the_task_and_what_is_near_it():
    system, task = prompt.system(), prompt.task_text(TASK)
    for said in ("## The language on one page", "## What cannot be said", "ReducedValueInTile"):
        assert said in system
    for command in ("pip install", "codetta new", "codetta promote", "$ codetta"):
        assert command not in system
    assert "a failure usually means" in system
    assert "def bias_gelu_mask(acc, bias: Row, keep: Tile):" in task
    assert "def bias_gelu(approximate" in task
    assert RIGHT.splitlines()[-1].strip() not in system + task


def test_a_slow_program_is_told_its_times():
    stage = Stage(name="16x16x16", verdict="estimate", facts={"candidate_ms": 2.0, "plain_ms": 1.0})
    report = Report(command="bench", file="f", task=TASK, stages=(stage,))
    told = prompt.slow(report, report, 2.0, loop.GOAL)
    assert "2.000 x the plain product" in told and told.count("codetta bench f") == 2


def test_the_page_about_traces_names_every_field(tmp_path):
    page = (HERE.parents[1] / "docs" / "agents.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page[page.index("## The trace") :], re.M))
    with replay(Says(fenced("right\n")), Fails(401)) as server:
        run(server, tmp_path, judge=lambda p, t, s: judged_by("right", ratio=2.0))
    events = Trace.resume(tmp_path).events
    assert {e["kind"] for e in events} == set(rows)
    for event in events:
        for name in set(event) - {"kind", "at", "previous_sha256"}:
            assert f"`{name}`" in rows[event["kind"]], (event["kind"], name)


# ------------------------------------------------------------------------ what answers can be
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Says("I cannot do that."), "no ```python block"),
        (Says(""), "empty"),
        (Says(None, usage=False), "empty"),
        (Says("<think>```python\nright\n```"), "empty"),
        (Says("", finish="length"), "cut off"),
        (Says("```python\nimport codetta\n", finish="length"), "cut off"),
        (Says(fenced("# right\n" * 10_000)), "is the limit"),
        (Garbles(), "empty"),
        (Garbles(b'{"choices": [{"message": {"content": 3}}]}'), "empty"),
    ],
    ids=[
        "prose",
        "empty",
        "null",
        "only thoughts",
        "cut",
        "cut in code",
        "too long",
        "no choices",
        "number",
    ],
)
def test_an_answer_without_a_file_is_a_round_and_the_model_is_told(tmp_path, answer, reason):
    with replay(answer, Says(fenced("right\n"))) as server:
        summary = run(server, tmp_path)
        told = server.requests[1]["messages"][-1]["content"]
    assert summary["outcomes"] == ["no code", "passed"]
    assert reason in told and "```python" in told
    first = Trace.resume(tmp_path).of("verdict")[0]
    assert first["code_sha256"] == "" and first["reports"] == []
    assert all(m["content"] for m in server.requests[1]["messages"])
    assert not (tmp_path / "rounds" / "001.py").exists()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (fenced("x = 1\n"), "x = 1\n"),
        (
            "```py\nold\n```\n\n```python\n@codetta.epilogue\nnew\n```\n```\nuse\n```",
            "@codetta.epilogue\nnew\n",
        ),
        ("```python\na = '```'\n```", "a = '```'\n"),
        (BARE, f"{BARE}\n"),
        ("<think>```python\nno\n```</think>\n```\nyes\n```", "yes\n"),
        ("Never closed:\n```python\nx = 1\n", "x = 1\n"),
        ("````\n```\nx\n```\n````", "```\nx\n```\n"),
        ("1. So:\n\n   ```python\n   x = 1\n   ```", "x = 1\n"),
    ],
    ids=[
        "one block",
        "the one with an epilogue",
        "fence in code",
        "bare",
        "thoughts",
        "unclosed",
        "long fence",
        "indented",
    ],
)
def test_the_file_is_found_in_an_answer(text, code):
    assert prompt.code_of(text, cut=False) == (code, "")


# -------------------------------------------------------------------- what endpoints can do
def test_a_busy_or_broken_endpoint_is_asked_again(tmp_path):
    script = [Fails(429, retry_after="0.01"), Fails(500), Fails(503), Says(fenced("right\n"))]
    with replay(*script) as server:
        summary = run(server, tmp_path)
        assert len(server.requests) == 4
    assert summary["stop"] == "fast" and summary["rounds"] == 1
    (answer,) = Trace.resume(tmp_path).of("answer")
    assert [f.partition(":")[0] for f in answer["failures"]] == [
        "RateLimitError", "InternalServerError", "InternalServerError"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "requests", "said"),
    [
        ([Fails(401, "no such key")], 1, "Check OPENAI_API_KEY"),
        ([Fails(404, "no such model")], 1, "Check --model"),
        ([Fails(500)] * 4, 4, "4 attempts"),
        ([Garbles(b"<html>")], 1, "no JSON"),
    ],
    ids=["key", "model", "down", "no JSON"],
)
def test_an_endpoint_that_does_not_answer_is_an_error_with_a_fix(tmp_path, script, requests, said):
    with replay(*script) as server:
        with pytest.raises(EndpointFailed, match=said) as caught:
            run(server, tmp_path)
        assert len(server.requests) == requests
    assert KEY not in str(caught.value)
    events = Trace.resume(tmp_path).events
    assert [e["kind"] for e in events] == ["start", "settings", "no_answer", "stop"]
    assert events[-1]["stop"] == "endpoint"


def test_a_verified_program_is_kept_when_the_endpoint_goes_away(tmp_path):
    with replay(Says(fenced("right\n")), Fails(401)) as server:
        summary = run(server, tmp_path, judge=lambda p, t, s: judged_by("right", ratio=1.5))
    assert summary["stop"] == "endpoint" and summary["best"]["ratio"] == 1.5
    assert (tmp_path / "best.py").read_text() == "right\n"


def test_an_unreachable_endpoint_is_named_without_its_password(tmp_path):
    nobody = Endpoint("http://user:hunter2@127.0.0.1:9/v1?k=hunter2", KEY)
    with pytest.raises(EndpointFailed, match="OPENAI_BASE_URL") as caught:
        Model(nobody, "m", attempts=2, pause_s=0.01).ask([], timeout_s=30)
    assert "hunter2" not in str(caught.value)
    assert "127.0.0.1:9/v1" in str(caught.value)


def test_a_model_that_wants_the_other_limit_gets_it(tmp_path):
    refused = Fails(400, "Unsupported parameter: use 'max_completion_tokens'")
    with replay(refused, Says(fenced("right\n"))) as server:
        run(server, tmp_path, loop.Limits(max_tokens=9))
        first, second = server.requests
    assert first["max_tokens"] == second["max_completion_tokens"] == 9
    assert "max_tokens" not in second


@pytest.mark.parametrize("script", [[Hangs()], [Says("late", drips=True)]], ids=["hangs", "drips"])
@pytest.mark.parametrize(
    ("limits", "stop"),
    [
        (loop.Limits(budget_s=0.5), "budget"),
        (loop.Limits(budget_s=60, timeout_s=0.5), "timeout"),
    ],
    ids=["budget", "timeout"],
)
def test_a_slow_model_is_left_in_time(tmp_path, script, limits, stop):
    with replay(*script) as server:
        summary = run(server, tmp_path, limits)
    assert summary["stop"] == stop and summary["best"] is None
    assert [e["kind"] for e in Trace.resume(tmp_path).events][2:] == ["no_answer", "stop"]


def test_pauses_end_with_the_time_limit(tmp_path):
    with replay(*[Fails(429, retry_after="30")] * 4) as server:
        summary = run(server, tmp_path, loop.Limits(budget_s=25))
        assert len(server.requests) == 1
    assert summary["stop"] == "budget"


def test_endpoint_comes_from_the_environment():
    with pytest.raises(NoEndpoint, match="OPENAI_API_KEY"):
        endpoint({})
    assert endpoint({"OPENAI_API_KEY": "k"}) == Endpoint("https://api.openai.com/v1", "k")
    own = endpoint({"OPENAI_BASE_URL": "http://localhost:1/v1"})
    assert own.url == "http://localhost:1/v1" and own.key
    assert "secret" not in repr(Endpoint("u", "secret"))


# -------------------------------------------------------------------------- going on, ending
def test_an_interrupted_run_goes_on_without_asking_again(tmp_path):
    def interrupted(path, task, seed):
        raise KeyboardInterrupt

    script = [Says(fenced("wrong\n")), Says(fenced("right\n"))]
    with replay(*script) as server, pytest.raises(KeyboardInterrupt):
        run(server, tmp_path / "a", judge=interrupted)
    with replay(script[1]) as server:
        summary = run(server, tmp_path / "a")
        rest = server.requests
    with replay(*script) as server:
        run(server, tmp_path / "b")
        whole = server.requests
    assert summary["outcomes"] == ["verify", "passed"]
    assert rest[-1]["messages"] == whole[-1]["messages"]


def test_earlier_runs_count_for_rounds_and_budget(tmp_path):
    with replay(Says(fenced("wrong 1\n")), Says(fenced("wrong 2\n"))) as server:
        run(server, tmp_path, loop.Limits(rounds=1))
        assert run(server, tmp_path, loop.Limits(rounds=1))["rounds"] == 1
        assert len(server.requests) == 1
        trace = Trace.resume(tmp_path)
        for kind in ("answer", "verdict"):
            (event,) = trace.of(kind)
            rest = {k: v for k, v in event.items() if k not in ("kind", "at", "previous_sha256")}
            trace.add(kind, **{**rest, "round": 2, "elapsed_s": 1e6})
        assert run(server, tmp_path)["stop"] == "budget"
        assert len(server.requests) == 1


def verdicts(*rounds):
    """Of (outcome, ratio, code) triples."""
    return [
        {"outcome": o, "ratio": r, "code_sha256": c, "program_sha256": f"p{c}"}
        for o, r, c in rounds
    ]


@pytest.mark.parametrize(
    ("rounds", "stop"),
    [
        ([], ""),
        ([("verify", None, "a")], ""),
        ([("verify", None, "a")] * 3, "stuck"),
        ([("no code", None, "")] * 3, ""),
        ([("passed", 1.08, "a")], "fast"),
        ([("passed", 1.3, "a")], ""),
        ([("passed", None, "a")], "verified"),
        ([("passed", 1.3, "a"), ("passed", 1.3, "a")], "converged"),
        ([("passed", 1.3, "a"), ("verify", None, "b")], ""),
        ([("passed", 1.3, "a"), ("verify", None, "b"), ("check", None, "c")], "converged"),
        ([("passed", 1.3, "a"), ("verify", None, "b"), ("passed", 1.2, "c")], ""),
        ([("passed", 1.3, "a"), ("passed", 1.295, "b"), ("passed", 1.294, "c")], "converged"),
        ([("check", None, str(i)) for i in range(8)], "rounds"),
    ],
)
def test_when_it_stops(rounds, stop):
    assert loop.stopped(verdicts(*rounds), loop.Limits(), 1.0) == stop


def test_it_stops_at_the_first_verified_program_if_that_is_enough():
    rounds = verdicts(("verify", None, "a"), ("passed", 2.0, "b"))
    assert loop.stopped(rounds, loop.Limits(until="verified"), 1.0) == "verified"
    assert loop.stopped(rounds[:1], loop.Limits(until="verified"), 0.0) == "budget"


def test_the_best_is_the_fastest_of_the_verified_ones(tmp_path):
    ratios = iter([1.5, 1.2, 1.4, 1.3])
    script = [Says(fenced(f"right {i}\n")) for i in range(4)]
    with replay(*script) as server:
        summary = run(
            server, tmp_path, judge=lambda p, t, s: judged_by(p.read_text(), ratio=next(ratios))
        )
    assert summary["stop"] == "converged"
    assert summary["best"]["round"] == 2
    assert (tmp_path / "best.py").read_text() == "right 1\n"


# ------------------------------------------------------------------------------ the command
@pytest.mark.parametrize(
    "arguments",
    [
        ["author"],
        ["author", TASK],
        ["author", "no_such_task", "--model", "m", "--out", "x"],
        ["author", TASK, "--resume", "x"],
        ["author", "--resume", "x"],
        ["author", TASK, "--model", "m", "--rounds", "0"],
    ],
)
def test_wrong_use_is_status_2(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with replay() as server:
        assert command(server, arguments).exit_code == 2
        assert not server.requests
    assert not list(tmp_path.iterdir())


def test_no_endpoint_is_wrong_use():
    env = {"OPENAI_BASE_URL": "", "OPENAI_API_KEY": ""}
    result = CliRunner().invoke(app, ["author", TASK, "--model", "m"], env=env)
    assert result.exit_code == 2
    assert "OPENAI_API_KEY" in result.stderr


def test_a_folder_is_chosen_and_the_trace_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "judgement", lambda p, t, s, g, r: judged_by(p.read_text()))
    begin = ["author", TASK, "--model", "m", "--rounds", "1"]
    with replay(Says(fenced("wrong\n")), Says(fenced("right\n"))) as server:
        first = command(server, begin)
        assert first.exit_code == 1 and "off by a mile" in first.stdout
        second = command(server, ["author", "--resume", f"author-{TASK}"])
        assert second.exit_code == 0, second.output
        assert "codetta promote" in second.stdout
    assert os.listdir() == [f"author-{TASK}"]
    assert len(lines(Path(f"author-{TASK}"))) == 9


# -------------------------------------------------------------------------------- the relay
def relay_module():
    file = HERE.parents[1] / "tools" / "relay_server.py"
    spec = importlib.util.spec_from_file_location("relay_server", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["relay_server"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def relay(tmp_path):
    module = relay_module()
    served = module.Relay(module.Desk(tmp_path / "desk", settle_s=0.0), 0)
    thread = threading.Thread(target=served.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield served
    served.stop()
    thread.join()


def waiting(relay, name):
    """Until a file of the relay's folder is there."""
    for _ in range(600):
        if (relay.desk.folder / name).exists():
            return (relay.desk.folder / name).read_text()
        threading.Event().wait(0.05)
    raise AssertionError(f"{name} was never written")


def test_whoever_writes_the_answer_file_has_answered(relay, tmp_path):
    model = Model(Endpoint(f"http://127.0.0.1:{relay.server_port}/v1", "none"), "someone")
    trace = loop.begin(tmp_path / "run", TASK, "someone", model.endpoint.shown, 5)

    def answers():
        waiting(relay, "001.prompt.md")
        (relay.desk.folder / "001.answer.md").write_text(fenced("right\n"))

    writer = threading.Thread(target=answers)
    writer.start()
    summary = loop.run(model, trace, loop.Limits(), judge=lambda p, t, s: judged_by(p.read_text()))
    writer.join()
    asked = waiting(relay, "001.prompt.md")
    assert "<!-- for someone -->" in asked and f"# Task {TASK}" in asked
    assert trace.start["system"] in asked
    assert summary["best"]["round"] == 1
    assert trace.of("answer")[0]["text"] == fenced("right\n")


def test_a_question_whose_client_hung_up_keeps_its_number(relay):
    model = Model(Endpoint(f"http://127.0.0.1:{relay.server_port}/v1", "none"), "someone")
    messages = [{"role": "user", "content": "why?"}]
    with pytest.raises(TimeoutError):
        model.ask(messages, timeout_s=1.0)
    for _ in range(200):  # the server sees it at its next poll
        if relay.desk.unanswered:
            break
        threading.Event().wait(0.05)
    (relay.desk.folder / "001.answer.md").write_text("because")
    assert model.ask(messages, timeout_s=60).text == "because"
    assert not (relay.desk.folder / "002.prompt.md").exists()
    (relay.desk.folder / "002.answer.md").write_text("again, because")
    assert model.ask(messages, timeout_s=60).text == "again, because"
    assert relay_module().Desk(relay.desk.folder).last == 2
