"""`codetta profile`: each rule of the diagnosis from counters as ncu prints them, and the report.

The CSV is written by hand in the form of ``ncu --csv --page raw``; it is not from a GPU.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench_samples import TASK, candidate, right, tracing
from typer.testing import CliRunner

import codetta
from codetta.author import counters, profile
from codetta.author.counters import METRICS, parse
from codetta.author.diagnosis import RULES, diagnose
from codetta.author.kernelfacts import Facts
from codetta.author.report import Report, Stage
from codetta.author.task import Task, TaskOperand, Workload
from codetta.cli import app
from codetta.language import Tile, group_sum, store, ungroup

LARGE = Workload(16384, 4096, 4096)
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
#: A healthy GEMM: what the cases below change.
USUAL = {
    "time us": 1100.0, "tensor pipe %": 75.0, "issue slots %": 30.0, "xu pipe %": 5.0,
    "shared memory %": 40.0, "L2 %": 45.0, "DRAM %": 30.0, "DRAM read bytes": 1.7e8,
    "DRAM written bytes": 1.3e8, "local stores": 0.0, "registers": 168.0, "occupancy %": 18.0,
    "stalls": {"gmma": 2.0, "short_scoreboard": 0.5, "long_scoreboard": 0.4},
}  # fmt: skip
PLAIN = USUAL | {"time us": 1000.0, "tensor pipe %": 82.0, "issue slots %": 20.0}


def ncu(values, unit="us"):
    """What ncu prints about one kernel with these counters."""
    named = {METRICS[n][0]: v for n, v in values.items() if n != "stalls"}
    named |= {STALL.format(n): v for n, v in values.get("stalls", {}).items()}
    units = [{"gpu__time_duration.sum": unit}.get(n, "") for n in named]
    made = io.StringIO()
    writer = csv.writer(made, quoting=csv.QUOTE_ALL)
    writer.writerow(["ID", "Kernel Name", *named])
    writer.writerow(["", "", *units])
    writer.writerow(["0", "gemm", *(f"{v:,}" for v in named.values())])
    return "==PROF== Connected to process 1\n" + made.getvalue()


def facts(fused=None, plain=None, **static):
    """Facts of counters that differ from the usual ones as given; without any, static ones."""
    usual = Facts(
        bytes_by_name={"residual": 134217728, "bias": 8192}, plain_bytes=301989888, tiles=4096,
        config="128x128 pp 2x1", stages=4, spills=0, registers=2.0, flops=3.0, product_ops=8192,
        expected=1.02,
    )  # fmt: skip
    if fused is not None:
        read = {"counters": parse(ncu(USUAL | fused)), "plain": parse(ncu(PLAIN | (plain or {})))}
        usual = replace(usual, **read)
    return replace(usual, **static)


#: For each rule: facts for which it holds, what its words must say, and facts just short of it.
CASES = {
    "tensor cores": (facts({"tensor pipe %": 88.0}), "88 % busy", facts({"tensor pipe %": 84.0})),
    "two kernels": (
        facts(split="group_sum: columns lie in several threads"), "group_sum", facts(split=""),
    ),
    "register spills": (facts(spills=92), "92 register spills", facts(spills=0)),
    "pipeline stages": (facts(stages=2), "2 stages", facts(stages=3)),
    "device memory": (
        facts({"DRAM %": 83.0}), "residual carries most: 128 MiB, 100%", facts({"DRAM %": 69.0}),
    ),
    "operands read again": (
        facts({"DRAM read bytes": 9e8}), "982 MiB moved where 416", facts({"DRAM read bytes": 3e8}),
    ),
    "L2 cache": (facts({"L2 %": 80.0}), "L2 cache is 80 %", facts({"L2 %": 80.0, "DRAM %": 75.0})),
    "special functions": (
        facts({"xu pipe %": 61.0}, special=3.0), "61 % busy: 3 of exp", facts({"xu pipe %": 49.0}),
    ),
    "issue slots": (
        facts({"issue slots %": 62.0}), "62 % of the issue slots (20 %",
        facts({"issue slots %": 62.0}, {"issue slots %": 50.0}),
    ),
    "shared memory": (
        facts({"stalls": {"short_scoreboard": 3.0, "gmma": 2.0}}), "60% of the waiting",
        facts({"stalls": {"short_scoreboard": 1.0, "gmma": 2.0}}),
    ),
    "waiting for loads": (
        facts({"stalls": {"long_scoreboard": 3.0, "gmma": 2.0}}), "60% of the waiting",
        facts({"stalls": {"long_scoreboard": 1.0, "gmma": 2.0}}),
    ),
    "tail": (facts(tiles=140), "140 tiles on 132", facts(tiles=132)),
    "idle multiprocessors": (
        facts({"occupancy %": 7.0}), "7 % of the warps", facts({"occupancy %": 18.0}),
    ),
    "arithmetic": (
        facts(flops=30.0, special=10.0, product_ops=1024), "30 plain and 10 special",
        facts(flops=30.0, special=10.0, product_ops=8192),
    ),
    "epilogue traffic": (
        facts(bytes_by_name={"z": 2**28, "y": 2**20}, expected=1.1), "z carries most: 256 MiB",
        facts(bytes_by_name={"z": 2**28}, expected=1.01),
    ),
}  # fmt: skip


def test_every_rule_has_a_case():
    assert [r.limit for r in RULES] == list(CASES)


def test_the_page_lists_every_finding_in_order():
    page = (Path(__file__).resolve().parents[2] / "docs" / "author-bench.md").read_text()
    table = page.split("| finding |")[1].split("\n\n")[0]
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == list(CASES)


@pytest.mark.parametrize("limit", CASES)
def test_a_rule_holds_on_its_facts_and_not_just_short_of_them(limit):
    holding, words, short = CASES[limit]
    findings = {f.limit: f for f in diagnose(holding)}
    assert words in findings[limit].words and len(findings[limit].change) > 20
    assert limit not in {f.limit for f in diagnose(short)}


def test_the_limit_comes_first_and_there_is_always_a_finding():
    both = facts({"DRAM %": 83.0, "time us": 1500.0}, spills=92, stages=2)
    assert [f.limit for f in diagnose(both)] == [
        "register spills", "pipeline stages", "device memory",
    ]  # fmt: skip
    (usual,), (static,) = diagnose(facts({})), diagnose(facts())
    assert usual.limit == "no single limit" and "82 % in the plain product" in usual.words
    assert static.limit == "its products" and "4 stages, 0 spills" in static.words


def test_a_kernel_as_fast_as_its_plain_product_is_at_its_limit():
    first = diagnose(facts({"time us": 1020.0, "issue slots %": 62.0}))[0]
    assert first.limit == "tensor cores" and "1.02 times the plain product" in first.words


def test_counters_are_read_in_their_units():
    assert parse(ncu({"time us": 1234.5}))["time us"] == 1234.5
    assert parse(ncu({"time us": 1.5}, "ms"))["time us"] == 1500.0
    text = ncu({"DRAM read bytes": 2.5}).replace('"","",""', '"","","Mbyte"')
    assert parse(text)["DRAM read bytes"] == 2.5e6


# ------------------------------------------------------------------------------ the stages
def test_counters_of_the_kernel_and_of_its_product_become_the_diagnosis():
    asked = []

    def count(problem, plain):
        asked.append((problem.m, problem.n, problem.k, plain))
        return ncu(PLAIN if plain else USUAL | {"DRAM %": 83.0})

    known, _ = profile.static_stage(right, LARGE, False)
    found, stage = profile.counter_stage(known, right, TASK, LARGE, count=count)
    assert asked == [(16384, 4096, 4096, False), (16384, 4096, 4096, True)]
    assert stage.facts["DRAM %"] == 83.0 and stage.facts["time us of a @ b"] == 1000.0
    assert next(iter(n for n in stage.facts if n.startswith("waits"))) == "waits_for_gmma"
    first, *_ = profile.diagnosis_stages(found)
    assert (first.name, first.verdict) == ("limit: device memory", "passed") and first.fix


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (RuntimeError("ncu failed:\n==ERROR== ERR_NVGPUCTRPERM"), "ERR_NVGPUCTRPERM"),
        ("==PROF== Disconnected", 'no line begins with "ID"'),
    ],
)
def test_without_counters_the_static_facts_have_to_do(answer, reason):
    def count(problem, plain):
        if isinstance(answer, Exception):
            raise answer
        return answer

    known, _ = profile.static_stage(right, LARGE, False)
    found, stage = profile.counter_stage(known, right, TASK, LARGE, count=count)
    assert stage.verdict == "skipped" and reason in stage.reason and found == known


def test_here_there_is_no_gpu_and_the_report_says_so(monkeypatch):
    monkeypatch.setattr(profile, "no_gpu", lambda: "there is no CUDA device")
    known, _ = profile.static_stage(right, LARGE, False)
    _, stage = profile.counter_stage(known, right, TASK, LARGE)
    assert stage.reason == "there is no CUDA device"
    monkeypatch.setattr(profile, "no_gpu", lambda: "")
    monkeypatch.setattr(counters, "find_ncu", lambda: None)
    assert "not on PATH" in profile.counter_stage(known, right, TASK, LARGE)[1].reason


@codetta.epilogue
def heavy(acc, x: Tile, y: Tile):
    return {"p": acc + x, "q": store(acc * y, "fp32")}


@codetta.epilogue
def grouped(acc):
    return {"y": acc * ungroup(group_sum(acc * acc, 64), 64)}


def test_static_facts_name_bytes_arithmetic_and_tiles():
    known, stage = profile.static_stage(heavy, LARGE, False)
    tile = 16384 * 4096
    # One 16-bit store is the plain product's own; the fp32 one costs what it adds.
    assert known.bytes_by_name == {"x": 2 * tile, "y": 2 * tile, "q": 4 * tile}
    assert (known.flops, known.special, known.product_ops) == (2, 0, 8192)
    m, n = map(int, known.config.split()[0].split("x"))
    assert known.tiles == -(-16384 // m) * -(-4096 // n) and 0.85 < known.filled <= 1
    assert stage.verdict == "estimate" and stage.facts["MiB"]["q"] == 256
    known, stage = profile.static_stage(grouped, LARGE, False)
    assert known.split and known.tiles == 0 and stage.facts["kernels"] == 2
    assert diagnose(known)[0].limit == "two kernels"


def test_dtypes_of_the_task_reach_the_profiled_kernel():
    def task(dtype):
        return Task("t", "", "easy", "", (TaskOperand("x", "tile", "", dtype=dtype),), (), dict)

    @codetta.epilogue
    def add(acc, x: Tile):
        return acc + x

    assert profile.problem_of(add, task(""), LARGE).flat_dtypes == ("bf16",)
    assert profile.problem_of(add, task("float32"), LARGE).flat_dtypes == ("fp32",)
    assert profile.problem_of(add, task("uint8"), LARGE) is None
    assert profile.problem_of(add, task(""), replace(LARGE, dtype="float16")).operand == "fp16"


def test_what_compiling_tells_goes_before_the_model(monkeypatch):
    made = Stage(name="compile", verdict="warning", reason="", facts={"ab_stages": 2, "spills": 7})
    monkeypatch.setattr(profile, "compiling", lambda program, w, progress: made)
    known, stage = profile.static_stage(right, LARGE, True)
    assert (known.stages, known.spills, stage.verdict) == (2, 7, "passed")
    limits = [f.limit for f in diagnose(known)]
    assert limits[:2] == ["register spills", "pipeline stages"]
    made = Stage(name="compile", verdict="skipped", reason="quack-kernels is not installed")
    monkeypatch.setattr(profile, "compiling", lambda program, w, progress: made)
    known, stage = profile.static_stage(right, LARGE, True)
    assert known.spills is None and stage.verdict == "estimate"
    assert stage.reason == "not compiled: quack-kernels is not installed"


def test_the_command_prints_one_screen_and_json(tmp_path, monkeypatch):
    made = candidate(tmp_path)
    monkeypatch.setattr(profile, "traced", tracing(made))
    monkeypatch.setattr(profile, "task_of", lambda made, given: replace(TASK, benchmark=(LARGE,)))
    command = ["profile", str(made.path), "--no-compile"]
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "100"})
    assert shown.exit_code == 0 and len(shown.output.splitlines()) <= 40
    assert "limit:" in shown.output and "fix:" in shown.output
    report = Report.model_validate(json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout))
    assert [s.name for s in report.stages][:3] == ["trace", "static", "counters"]
    assert report.program_sha256 == right.digest and report.exit_status == 0
