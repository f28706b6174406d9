"""`codetta bench`: verdicts from times that a test makes up, floors, estimates, and its report."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_samples import SMALL, TASK, Clock, candidate, right, tracing, verified, wrong
from typer.testing import CliRunner

import codetta
from codetta.author import bench, contenders, estimate, sandbox
from codetta.author.draws import drawn
from codetta.author.report import Report, Stage
from codetta.author.task import TaskOperand, TaskOutput, Workload
from codetta.author.verdict import judge
from codetta.cli import app
from codetta.language import (
    Col,
    Index,
    Row,
    Tile,
    colsum,
    group_sum,
    rowmax,
    select,
    store,
    ungroup,
)  # fmt: skip
from codetta.language.program import Program
from codetta.tuning.comparison import interval, ratio

LARGE = Workload(16384, 4096, 4096)
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "2026-12-02-h200"


# --------------------------------------------------------------------------- statistics
def test_the_interval_holds_the_median_and_narrows_with_more_rounds():
    few, many = ([float(i % 10) for i in range(n)] for n in (10, 200))
    for values in (few, many):
        found = interval(values)
        assert found.low <= found.median <= found.high and found.median == 4.5
    assert interval(many).high - interval(many).low < interval(few).high - interval(few).low
    assert interval(many) == interval(many)


def test_ratios_are_taken_within_a_round():
    drift = [1.0, 2.0, 4.0, 8.0]  # a common factor of each round cancels
    assert ratio([0.9 * x for x in drift], drift) == pytest.approx((0.9, 0.9, 0.9))
    with pytest.raises(ValueError):
        ratio(drift, drift[:-1])


# ----------------------------------------------------------------------------- verdicts
def times(noise=0.01, rounds=100, **ms):
    clock = Clock(noise, **ms)
    return {n: t.ms for n, t in clock(dict.fromkeys(ms, lambda: None), rounds).items()}


def test_a_program_that_takes_less_is_faster():
    found = judge(times(candidate=0.9, plain=0.85, eager=1.4, compile=1.0), 0.5)
    assert (found.verdict, found.facts["verdict"], found.facts["rival"]) == (
        "passed", "faster", "compile",
    )  # fmt: skip
    assert found.facts["over_compile_low"] < 0.9 < found.facts["over_compile_high"] < 1
    assert found.facts["over_plain"] == pytest.approx(0.9 / 0.85, rel=0.01)
    assert "0.900 times the time of compile" in found.words


def test_a_program_that_takes_longer_is_slower_and_fails():
    found = judge(times(candidate=1.05, plain=0.85, eager=1.4, compile=1.0), 0.5)
    assert (found.verdict, found.facts["verdict"]) == ("failed", "slower")
    assert "profile" in found.fix and found.words.startswith("slower: 1.05")


@pytest.mark.parametrize("ms", [0.995, 1.0, 1.005])
def test_a_difference_within_the_noise_is_noise_whatever_the_medians(ms):
    found = judge(times(0.3, 20, candidate=ms, plain=0.85, eager=1.4, compile=1.0), 0.5)
    assert found.verdict == found.facts["verdict"] == "noise"
    assert found.facts["over_compile_low"] <= 1 <= found.facts["over_compile_high"]


def test_the_same_program_is_seldom_called_faster_or_slower():
    verdicts = []
    for seed in range(20):
        clock = Clock(0.1, candidate=1.0, compile=1.0)
        clock.random.seed(seed)
        found = clock(dict.fromkeys(("candidate", "compile"), lambda: None), 30)
        verdicts.append(judge({n: t.ms for n, t in found.items()}, 0.1).verdict)
    assert verdicts.count("noise") >= 16  # 19 expected of 20 at 95 %


def test_a_time_below_the_floor_is_implausible_and_no_victory():
    found = judge(times(candidate=0.3, plain=0.85, compile=1.0), 0.5)
    assert (found.verdict, found.facts["verdict"]) == ("failed", "implausible")
    assert "0.5 ms" in found.words and "over_compile" not in found.facts


def test_a_rival_below_the_floor_is_not_believed():
    found = judge(times(candidate=0.9, plain=0.85, compile=1.0, recorded=0.1), 0.5)
    assert found.facts["verdict"] == "faster" and found.facts["rival"] == "compile"
    assert "floor" in found.facts["recorded_note"]


def test_the_recorded_program_is_a_rival_and_the_plain_product_is_none():
    found = judge(times(candidate=0.9, plain=0.8, compile=1.0, recorded=0.87), 0.5)
    assert found.facts["rival"] == "recorded" and found.facts["verdict"] == "slower"
    assert judge(times(candidate=0.9, plain=0.8), 0.5).verdict == "noise"


def test_more_than_ten_times_eager_is_flagged():
    for eager, flagged in ((9.5, False), (12.0, True)):
        facts = judge(times(candidate=1.0, compile=2.0, eager=eager), 0.5).facts
        assert ("flagged" in facts) == flagged and facts["verdict"] == "faster"


# --------------------------------------------------------------------- floor and estimates
def test_the_floor_is_bytes_or_products_whichever_takes_longer():
    operations = 2 * 16384 * 4096 * 4096 / 989.4e12
    assert estimate.floor_ms(TASK, LARGE) == pytest.approx(operations * 1e3)
    thin = Workload(16384, 4096, 8)
    moved = 2 * (16384 * 8 + 8 * 4096) + 2 * 4096 + 2 * (2 * 16384 * 4096)  # bias, residual, y
    assert estimate.floor_ms(TASK, thin) == pytest.approx(moved / 4.8e12 * 1e3)
    fp8 = replace(TASK, outputs=(TaskOutput("y", "tile", "", dtype="e4m3"),))
    assert estimate.task_bytes(fp8, thin)["y"] == 16384 * 4096


def test_no_program_lowers_the_floor_and_every_gpu_has_one():
    slow, fast = (estimate.floor_ms(TASK, LARGE, estimate.gpu_named(n))
                  for n in ("NVIDIA H100 PCIe", "NVIDIA B200"))  # fmt: skip
    assert fast < estimate.floor_ms(TASK, LARGE, estimate.gpu_named("NVIDIA H200")) < slow
    assert estimate.gpu_named("some GPU of next year").name == "B200 SXM"


@codetta.epilogue
def grouped(acc, bias: Row, residual: Tile):
    y = acc + bias + residual
    return {"y": y * ungroup(group_sum(y * y, 64), 64)}


@codetta.epilogue
def wide(acc, bias: Row, residual: Tile):
    return {"y": acc + bias + residual, "more": store(acc, "fp32")}


def test_a_program_that_moves_more_or_is_two_kernels_is_estimated_to_take_longer():
    one = estimate.fused(right, LARGE)
    more, two = estimate.fused(wide, LARGE), estimate.fused(grouped, LARGE)
    assert one.config is not None and not one.reason
    assert two.config is None and "group" in two.reason
    assert estimate.plain_ms(LARGE) <= one.ms < more.ms < two.ms


def test_the_model_gives_what_was_measured():
    """36 kernels of three decoder layers: within a fifth, and within a tenth of the ratio."""
    count = 0
    for file in sorted(RESULTS.glob("tune_d*_16384.json")):
        for kernel in json.loads(file.read_text())["kernels"].values():
            w = Workload(kernel["m"], kernel["n"], kernel["k"])
            found = estimate.fused(Program.parse(kernel["program"]), w).ms
            measured = kernel["best"]["median_ms"]
            assert found == pytest.approx(measured, rel=0.2), kernel["name"]
            over = measured / kernel["cublas_ms"]
            assert found / estimate.plain_ms(w) == pytest.approx(over, abs=0.13), kernel["name"]
            count += 1
    assert count == 36


def test_an_estimate_says_that_it_is_one_and_why():
    stage = bench.estimated(TASK, right, LARGE, wide, "there is no GPU")
    assert stage.verdict == "estimate" and "nothing was timed: there is no GPU" in stage.reason
    f = stage.facts
    assert f["floor_ms"] < f["plain_ms"] < f["candidate_ms"] < f["compile_ms"] < f["eager_ms"]
    assert f["recorded_ms"] > f["candidate_ms"] and f["over_compile"] < 1
    assert f["eager_ms"] - f["plain_ms"] == pytest.approx(  # two sums, each in and out
        ((16384 * 4096 * 5 + 4096) * 2) / 4.8e12 * 1e3
    )
    assert "recorded_ms" not in bench.estimated(TASK, right, LARGE, right, "").facts


# -------------------------------------------------------------------------------- timing
@pytest.fixture(autouse=True)
def no_code_generation(monkeypatch):
    """Inductor takes 20 s to compile its first function; Dynamo alone traces as it does."""
    monkeypatch.setattr(contenders, "compiled", functools.partial(torch.compile, backend="eager"))


def given(seed=1):
    a, b, operands = drawn(TASK, SMALL, seed)
    return a, b, operands


def test_all_contenders_compute_the_same_from_the_same_arrays():
    a, b, operands = given()
    with torch.no_grad():
        runs, notes = contenders.contenders(TASK, right, wrong, a, b, operands)
        assert set(runs) == {"candidate", "plain", "eager", "compile", "recorded"} and not notes
        exact = reference64(a, b, operands)
        for name in ("eager", "compile"):
            (y,) = runs[name]()
            assert y.dtype == torch.bfloat16
            torch.testing.assert_close(y.double(), exact, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(runs["candidate"]().y.double(), exact, rtol=2e-2, atol=2e-2)
        assert torch.equal(runs["plain"](), a @ b)
    assert "recorded" not in contenders.contenders(TASK, right, right, a, b, operands)[0]


def reference64(a, b, operands):
    wide = {n: x.double() for n, x in operands.items()}
    return TASK.reference(a.double() @ b.double(), **wide)["y"]


def test_a_rival_that_cannot_run_is_a_note_and_a_candidate_that_cannot_is_an_error():
    def broken(acc, bias, residual):
        raise RuntimeError("no such operation")

    runs, notes = contenders.contenders(replace(TASK, reference=broken), right, None, *given())
    assert set(runs) == {"candidate", "plain"} and "no such operation" in notes["eager"]
    with pytest.raises(codetta.errors.CodettaError):
        contenders.contenders(TASK, codetta.programs.swiglu, None, *given())


def timed(program=right, recorded=None, **ms):
    clock = Clock(**({"candidate": 0.9, "plain": 0.85, "eager": 1.4, "compile": 1.0} | ms))
    device = torch.device("cpu")
    stage = bench.timed(TASK, program, SMALL, recorded, 1, measure=clock, device=device, rounds=50)
    return stage, clock


def test_a_timed_stage_has_times_intervals_and_the_verdict():
    stage, clock = timed()
    assert stage.verdict == "passed" and stage.facts["words"].startswith("faster")
    assert stage.name == str(SMALL) and stage.facts["rounds"] == 50 and clock.calls == 2
    for name in ("candidate", "plain", "eager", "compile"):
        low, middle, high = (stage.facts[f"{name}_ms{end}"] for end in ("_low", "", "_high"))
        assert low <= middle <= high
    assert [e.tensor for e in stage.worst] == ["y"] and stage.worst[0].ratio < 1


def test_slower_and_implausible_fail_and_noise_does_not():
    assert timed(candidate=1.2)[0].verdict == "failed"
    assert timed(candidate=1.0, compile=1.0001, noise=0.2)[0].verdict == "noise"
    assert "implausible" in timed(candidate=1e-9)[0].reason


def test_a_fast_program_whose_timed_outputs_are_wrong_fails():
    stage, _ = timed(wrong)
    assert stage.verdict == "failed" and "wrong: y" in stage.reason
    assert stage.worst[0].ratio > 1 and stage.facts["verdict"] == "wrong"


def test_timed_outputs_are_judged_by_row_in_any_dtype_and_kind():
    def reference(acc, residual, scale, target):
        x = acc + residual * scale[:, None]
        return {"q": x, "amax": x.abs().amax(1), "total": x.sum(0)}

    @codetta.epilogue
    def program(acc, residual: Tile, scale: Col, target: Index):
        x = acc + residual * scale
        return {"q": store(x, "e4m3"), "amax": rowmax(abs(x)) + 0.0 * select(x, target),
                "total": colsum(x)}  # fmt: skip

    kinds = (("residual", "tile"), ("scale", "col"), ("target", "index"))
    task = replace(
        TASK, reference=reference, operands=tuple(TaskOperand(n, k, "") for n, k in kinds),
        outputs=(TaskOutput("q", "tile", "", dtype="e4m3"), TaskOutput("amax", "col", ""),
                 TaskOutput("total", "row", "")),
    )  # fmt: skip
    a, b, operands = drawn(task, Workload(200, 32, 16), 1)
    got = contenders.named(program, codetta.gemm(a, b, program, **operands))
    errors = {e.tensor: e.ratio for e in bench.sampled(task, a, b, operands, got, 1)}
    assert set(errors) == {"q", "amax"} and max(errors.values()) < 1
    for name in errors:
        bad = got | {name: (got[name].float() * 1.3).to(got[name].dtype)}
        assert bench.sampled(task, a, b, operands, bad, 1)[0].ratio > 1


def test_a_foreign_kernel_is_a_rival_by_its_own_rounds():
    clock = Clock(candidate=0.9, plain=0.85, eager=1.4, compile=1.0)
    stage = bench.timed(TASK, right, SMALL, None, 1, measure=clock, device=torch.device("cpu"),
                        rounds=30, against=[0.8, 0.81, 0.8, 0.79] * 20)  # fmt: skip
    assert stage.facts["rival"] == "against" and stage.facts["verdict"] == "slower"
    assert stage.facts["over_against_low"] > 1 and stage.facts["against_ms"] == 0.8


def test_a_foreign_kernel_that_is_wrong_is_no_rival_and_no_fault(monkeypatch):
    stages = (Stage(name="outputs", verdict="failed", reason="y is constant", fix="compute it"),)
    ran = sandbox.ForeignRun(stages, {str(SMALL): (0.1,)})
    monkeypatch.setattr(sandbox, "run_foreign", lambda *args, **named: ran)
    (stage,), times = bench.foreign_kernel("other.py", TASK, 1, lambda text: None)
    assert (stage.name, stage.verdict) == ("against", "skipped") and times == {}
    assert "no rival: outputs: y is constant" in stage.reason
    ran = sandbox.ForeignRun((Stage(name="outputs", verdict="passed"),), {})
    (stage,), times = bench.foreign_kernel("other.py", TASK, 1, lambda text: None)
    assert stage.verdict == "skipped" and "right, but not timed: there is no CUDA" in stage.reason


# ------------------------------------------------------------------------------- reports
@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A candidate on disk, and what its verification says; how often it was asked."""
    made, asked = candidate(tmp_path), []
    said = {"verdict": "passed"}

    def verify(path, task, *, seed, quick):
        asked.append((seed, quick))
        return verified(made, said["verdict"])

    monkeypatch.setattr(bench, "traced", tracing(made))
    monkeypatch.setattr("codetta.author.verify.verify_candidate", verify)
    monkeypatch.setattr(bench, "_PASSED", set())
    monkeypatch.setenv("CODETTA_REGISTRY", str(tmp_path / "registry.jsonl"))
    return made, asked, said


def test_a_program_is_verified_once_before_it_is_timed(quick):
    made, asked, _ = quick
    report = bench.bench_candidate(made.path, TASK, seed=11)
    assert [s.name for s in report.stages] == ["trace", "verify", *map(str, TASK.benchmark)]
    assert [s.verdict for s in report.stages] == ["passed"] * 2 + ["estimate"] * 2
    assert asked == [(11, True)] and report.seed == 11 and report.exit_status == 0
    again = bench.bench_candidate(made.path, TASK)
    assert len(asked) == 1 and again.seed is not None  # known by its program's hash
    other = bench.bench_candidate(made.path, replace(TASK, formula="another"))
    assert len(asked) == 2 and other.passed


def test_a_wrong_program_is_not_timed(quick):
    made, _, said = quick
    said["verdict"] = "failed"
    report = bench.bench_candidate(made.path, TASK)
    _, stage = report.stages
    assert stage.name == "verify: fuzz" and stage.replay and report.exit_status == 1


def test_the_command_prints_a_table_and_json_and_ends_as_the_report_says(quick, monkeypatch):
    made, _, said = quick
    monkeypatch.setattr(bench, "task_of", lambda candidate, given: TASK)
    shown = CliRunner().invoke(
        app, ["bench", str(made.path), "--seed", "5"], env={"COLUMNS": "100"}
    )
    assert shown.exit_code == 0 and len(shown.output.splitlines()) <= 40
    assert "ms, estimated" in shown.output and "nothing was timed" in shown.output
    data = CliRunner().invoke(app, ["bench", str(made.path), "--seed", "5", "--json"])
    report = Report.model_validate_json(data.stdout)
    assert report.command == "bench" and report.seed == 5 and len(report.stages) == 4
    said["verdict"] = "failed"
    bench._PASSED.clear()
    assert CliRunner().invoke(app, ["bench", str(made.path)]).exit_code == 1
