"""The registry: what is promoted, what is refused, and what a reader believes of the file."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from bench_samples import SMALL, TASK, candidate, right, tracing, verified, wrong
from typer.testing import CliRunner

import codetta
from codetta.author import bench, promotion, records, registry
from codetta.author.contract import contract
from codetta.author.records import Record, Timing
from codetta.author.report import Report, Stage
from codetta.author.task import Workload
from codetta.cli import app
from codetta.errors import NothingRecorded, NotPromoted, RegistryNotWritable

SHIPPED = records.SHIPPED


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """An empty registry of the test's own, and none that comes with the package."""
    path = tmp_path / "home" / "registry.jsonl"
    monkeypatch.setenv(records.VARIABLE, str(path))
    monkeypatch.setattr(records, "SHIPPED", tmp_path / "none.jsonl")
    records._warn.cache_clear()
    return path


def record(program=right, ms=1.1, gpu="NVIDIA H200", workload=SMALL, **changed):
    timing = Timing(workload.m, workload.n, workload.k, workload.dtype, gpu, ms, 1.0)
    made = Record(
        task=TASK.name, task_sha256=records.promise(TASK), source_sha256="0" * 64,
        program_sha256=program.digest, text=program.text, errors={"y": (0.5, 2.0)},
        timings=(timing,), environment={"torch": "2"}, seed=3, date="2026-12-02T00:00:00+00:00",
    )  # fmt: skip
    return replace(made, **changed)


def promoted(tmp_path, monkeypatch, report=None, program=right):
    """A promotion whose verification says ``report``."""
    made = candidate(tmp_path, program)
    monkeypatch.setattr(promotion, "traced", tracing(made))
    found = report or verified(made)
    monkeypatch.setattr(promotion, "verify_candidate", lambda path, task, seed: found)
    return promotion.promotion(made.path, TASK, seed=7)


# ------------------------------------------------------------------------------- the file
def test_what_is_appended_is_read_back_whole(file):
    made = record()
    assert records.append(made) == file
    assert records.records() == (made,)
    assert records.records()[0].program == right


def test_reading_nothing_is_no_error():
    assert records.records() == ()


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[: len(line) // 2],
        lambda line: line.replace('"seed": 3', '"seed": 4'),
        lambda line: line.replace("%0 = acc", "%0 = const(value=0.0)"),
        lambda line: "not json at all",
        lambda line: "[]",
        lambda line: json.dumps({"sha256": "", "record": None}),
    ],
)
def test_a_damaged_line_is_ignored_with_one_warning_and_the_others_are_read(file, damage):
    for ms in (1.1, 1.2, 1.3):
        records.append(record(ms=ms))
    lines = file.read_text().splitlines()
    lines[1] = damage(lines[1])
    file.write_text("\n".join(lines) + "\n")
    with pytest.warns(UserWarning, match="1 line of .* ignored"):
        found = records.records()
    assert [r.timings[0].ms for r in found] == [1.1, 1.3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert records.records() == found


def test_a_forged_text_under_a_correct_checksum_is_ignored(file):
    good = record()
    for forged in (
        replace(good, text=wrong.text),  # not the program whose hash it has
        replace(good, format=99),
        replace(good, timings=(replace(good.timings[0], ms=-1.0),)),
    ):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(records._line(forged.data()))
        records._warn.cache_clear()
        with pytest.warns(UserWarning, match="ignored"):
            assert records.records() == ()
    file.write_bytes(records._line(good.data()))
    assert records.records() == (good,)


def test_a_line_cut_off_by_a_crash_does_not_swallow_the_next(file):
    records.append(record(ms=1.1))
    with file.open("ab") as handle:
        handle.write(b'{"sha256": "12')
    records.append(record(ms=1.2))
    with pytest.warns(UserWarning, match="1 line"):
        assert [r.timings[0].ms for r in records.records()] == [1.1, 1.2]


def _append_twenty(number, gate):
    made = record(timings=tuple([record().timings[0]] * 50))  # longer than a page
    gate.wait()
    for seed in range(20):
        records.append(replace(made, seed=1000 * number + seed))


def test_eight_processes_that_append_at_once_lose_nothing():
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(8)
    children = [context.Process(target=_append_twenty, args=(i, gate)) for i in range(8)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert len({r.seed for r in records.records()}) == len(records.records()) == 160


def test_many_threads_append_whole_lines(file):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: records.append(record(seed=seed)), range(64)))
    assert sorted(r.seed for r in records.records()) == list(range(64))


def test_a_registry_that_cannot_be_written_is_said_and_reading_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv(records.VARIABLE, "/dev/null/registry.jsonl")
    with pytest.raises(RegistryNotWritable, match="CODETTA_REGISTRY"):
        records.append(record())
    assert records.records() == ()
    report, made = promoted(tmp_path, monkeypatch)
    assert made is None and report.stages[-1].name == "record"
    assert report.stages[-1].verdict == "failed" and report.exit_status == 1


def test_records_of_the_package_are_read_and_never_written(file, tmp_path, monkeypatch):
    shipped = tmp_path / "shipped.jsonl"
    shipped.write_bytes(records._line(record(ms=1.5).data()))
    monkeypatch.setattr(records, "SHIPPED", shipped)
    before = shipped.read_bytes()
    records.append(record(ms=1.2))
    assert [r.timings[0].ms for r in records.records()] == [1.5, 1.2]
    assert shipped.read_bytes() == before


def test_what_comes_with_the_package_is_whole_and_current():
    if not SHIPPED.is_file():
        pytest.skip("this checkout comes without records")
    lines = SHIPPED.read_bytes().splitlines()
    found = records._read(SHIPPED, 0, len(lines))
    assert len(found) == len(lines) > 0
    for made in found:
        task = registry.find(made.task)
        assert made.task_sha256 == records.promise(task), made.task
        assert contract(made.program, task).verdict == "passed", made.task


# ---------------------------------------------------------------------------- the look-up
def test_the_best_is_the_least_over_the_plain_product():
    other = record(wrong, ms=1.05)
    for made in (record(ms=1.2), other, record(ms=1.1)):
        records.append(made)
    assert registry.best(TASK) == other


def test_measured_goes_before_estimated_and_the_newer_of_equals_wins():
    records.append(record(ms=1.0, gpu=""))
    assert registry.best(TASK).timings[0].gpu == ""
    records.append(record(ms=1.3, seed=1))
    records.append(record(ms=1.3, seed=2))
    assert registry.best(TASK).seed == 2
    assert registry.best(TASK, gpu="NVIDIA H100").timings[0].ms == 1.0  # nothing measured there


def test_the_nearest_recorded_size_counts():
    small, large = Workload(64, 64, 64), Workload(16384, 4096, 4096)
    for program, ms in ((right, (1.0, 1.5)), (wrong, (1.2, 1.1))):
        pairs = zip(ms, (small, large), strict=True)
        timings = [record(ms=t, workload=w).timings[0] for t, w in pairs]
        records.append(record(program, timings=tuple(timings)))
    assert registry.best(TASK, Workload(128, 64, 64)).program == right
    assert registry.best(TASK, Workload(8192, 4096, 4096)).program == wrong
    assert registry.best(TASK).program == wrong  # sqrt(1.32) against sqrt(1.5)
    assert registry.best(TASK, dtype="float16") is None


def test_a_record_is_silent_once_the_task_has_changed():
    records.append(record())
    assert registry.best(TASK) is not None
    assert registry.best(replace(TASK, formula="y = acc + bias - residual")) is None
    assert registry.best(replace(TASK, constants={"eps": 1.0})) is None
    assert registry.best(replace(TASK, title="Another title")) is not None


def test_recorded_programs_are_had_by_name_and_listed(monkeypatch):
    with pytest.raises(NothingRecorded, match="recorded are nothing"):
        codetta.programs.recorded("mish")
    task = registry.find("mish")

    @codetta.epilogue
    def made(acc):
        return {"y": acc}

    records.append(record(made, task="mish", task_sha256=records.promise(task)))
    assert codetta.programs.recorded("mish", m=64, n=32, k=16) == made
    with pytest.raises(NothingRecorded, match="in float64"):
        codetta.programs.recorded("mish", dtype="float64")
    listed = json.loads(CliRunner().invoke(app, ["programs", "--json"]).output)
    assert listed[-1]["call"] == 'recorded("mish")' and "1.100 x a @ b" in listed[-1]["source"]
    one = CliRunner().invoke(app, ["programs", "mish"]).output
    assert "promoted 2026-12-02" in one and "store y: operand = %0" in one


# ------------------------------------------------------------------------------ promotion
def test_a_verified_program_is_recorded_with_its_errors_and_estimates(tmp_path, monkeypatch):
    report, made = promoted(tmp_path, monkeypatch)
    assert report.passed and report.stages[-1].name == "record"
    assert records.records() == (made,)
    assert made.program == right and made.errors == {"y": (0.5, 2.0)} and made.seed == 7
    assert made.source_sha256 == candidate(tmp_path).source_sha256
    assert [(t.m, t.gpu) for t in made.timings] == [(64, ""), (128, "")]  # no GPU: estimates
    assert made.environment["torch"] and made.date.endswith("+00:00")


def test_what_failed_is_refused_with_the_report(tmp_path, monkeypatch, file):
    made = candidate(tmp_path)
    report, nothing = promoted(tmp_path, monkeypatch, verified(made, "failed"))
    assert nothing is None and not file.exists()
    assert report.exit_status == 1 and report.stages[1].replay.endswith("fuzz-3")
    with pytest.raises(NotPromoted, match="fuzz failed: y is wrong") as caught:
        registry.promote_candidate(made.path, TASK)
    assert caught.value.fields["report"].stages[1] == report.stages[1]


@pytest.mark.parametrize("changed", ["source_sha256", "program_sha256"])
def test_another_source_than_was_verified_is_refused(tmp_path, monkeypatch, file, changed):
    report, made = promoted(
        tmp_path, monkeypatch, verified(candidate(tmp_path), **{changed: "f" * 64})
    )
    assert made is None and not file.exists()
    assert report.stages[-1].reason == "the file changed while it was verified"


def test_a_file_that_is_replaced_meanwhile_is_refused(tmp_path, monkeypatch, file):
    made = candidate(tmp_path)

    def slow(path, task, seed):
        path.write_text("# another program\n")
        return verified(made)

    monkeypatch.setattr(promotion, "traced", tracing(made))
    monkeypatch.setattr(promotion, "verify_candidate", slow)
    assert promotion.promotion(made.path, TASK)[1] is None and not file.exists()


@pytest.mark.parametrize(
    ("verdict", "kept"),
    [("faster", True), ("noise", True), ("slower", True), ("implausible", False), ("wrong", False)],
)
def test_a_slow_program_is_recorded_with_its_time_a_wrong_or_impossible_one_is_not(
    tmp_path, monkeypatch, verdict, kept
):
    facts = {"verdict": verdict, "candidate_ms": 1.2, "plain_ms": 1.0}
    told = {"faster": "passed", "noise": "noise"}.get(verdict, "failed")
    stage = Stage(name="64", verdict=told, reason=verdict, facts=facts)
    monkeypatch.setattr(bench, "bench_stages", lambda *args: [stage, stage])
    monkeypatch.setattr(promotion, "environment", lambda: {"gpu": "NVIDIA H200"})
    report, made = promoted(tmp_path, monkeypatch)
    assert (made is not None) == report.passed == kept == bool(records.records())
    if made is not None:
        assert [(t.gpu, t.ratio) for t in made.timings] == [("NVIDIA H200", 1.2)] * 2
    if verdict == "slower":
        assert [s.verdict for s in report.stages[-3:]] == ["warning", "warning", "passed"]


MINE = """
import codetta
from codetta.language import relu, square, unpack

TASK = "relu_squared_gate"

@codetta.epilogue
def mine(acc):
    g, u = unpack(acc)
    return {"y": square(relu(g)) * u}
"""


@pytest.mark.slow
def test_from_a_file_to_a_call_and_a_wrong_file_to_a_refusal(tmp_path, file):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    done = CliRunner().invoke(app, ["promote", str(path), "--seed", "5", "--json"])
    report = Report.model_validate_json(done.stdout)
    assert done.exit_code == 0 and report.stages[-1].facts["file"] == str(file)
    program = codetta.programs.recorded("relu_squared_gate")
    assert program.digest == report.program_sha256 == records.records()[0].program_sha256
    assert "y" in records.records()[0].errors
    before = file.read_bytes()
    for bad, stage in (("square(relu(g))", "relu(g)"), "integers"), (("relu(g)", "g g"), "trace"):
        path.write_text(MINE.replace(*bad))
        refused = CliRunner().invoke(app, ["promote", str(path), "--seed", "5"])
        assert refused.exit_code == 1 and f"FAILED: {stage}" in refused.output
    assert file.read_bytes() == before
    assert CliRunner().invoke(app, ["promote", str(tmp_path / "none.py")]).exit_code == 2
