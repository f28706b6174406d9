"""The search for configurations, with made-up kernels and times; and the command without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import codetta
from codetta import programs
from codetta.backends.cuda import config_cache
from codetta.backends.cuda.configs import Configuration
from codetta.backends.cuda.lowering import lower
from codetta.cli import app
from codetta.errors import BackendUnavailable, NothingToTune
from codetta.language.types import Kind
from codetta.tuning import search as searching
from codetta.tuning import tune as tuning
from codetta.tuning.layer import fewer_heads, layer_problems
from codetta.tuning.search import search
from codetta.tuning.space import DTYPES, Problem, arrays, configurations
from codetta.tuning.timing import Times
from codetta.tuning.workers import Job, Statics, compile_all

CATALOG = {n: e.program for n, e in programs.catalog().items() if e.program.has_acc}
RESIDUAL = Problem(CATALOG["residual_ssq"], 256, 512, 64, "nn")
FINE = Statics(stages=4)


class Machine:
    """Kernels that take as long as ``ms`` says, by configuration."""

    def __init__(self, ms: Callable[[Configuration], float]) -> None:
        self.ms, self.described, self.rounds = ms, [], []

    def describe(self, program, a, b, operands, config) -> Any:
        self.described.append(config)
        if self.ms(config) < 0:
            raise RuntimeError("it does not load")
        return SimpleNamespace(
            stores=(), feed_a=lambda x: x, feed_b=lambda x: x, feed_c=None, plan=config,
            prepare=lambda operands: ({}, None), launch=lambda config, *rest: config,
        )  # fmt: skip

    def measure(self, runs: Mapping[str, Callable[[], Any]], count: int) -> dict[str, Times]:
        self.rounds.append((len(runs), count))
        found = {}
        for name, run in runs.items():
            made = run()
            ms = self.ms(made) if isinstance(made, Configuration) else 1.0
            found[name] = Times([ms] * count)
        return found


@pytest.fixture
def machine(monkeypatch):
    def make(ms: Callable[[Configuration], float]) -> Machine:
        made = Machine(ms)
        monkeypatch.setattr(searching, "describe", made.describe)
        return made

    return make


def searched(machine: Machine, statics=lambda c: FINE, **options):
    known = [(c, statics(c)) for c in configurations(lower(RESIDUAL.program, "bf16"))]
    return search(RESIDUAL, arrays(RESIDUAL, "meta"), known, machine.measure, **options)


def time_of(config: Configuration) -> float:
    """Smallest for 128 x 160 in clusters of (1, 2) with rasters of 16 tiles."""
    far = abs(config.tile_m - 128) + abs(config.tile_n - 160) + 50 * (config.cluster_n != 2)
    return 1 + far / 100 + (config.max_swizzle != 16) / 1000 + config.epi_n / 100


def test_the_fastest_wins_with_its_best_raster(machine):
    found = searched(machine(time_of), quick=3, final=9)
    best = found.best
    assert best is not None and best.config.tile == (128, 160) and best.config.cluster_n == 2
    assert best.config.max_swizzle == 16
    assert best.times is not None and len(best.times.ms) == 9
    medians = [c.times.median for c in found.candidates if c.times is not None]
    assert medians[0] == min(medians)


def test_few_are_measured_often(machine):
    made = machine(time_of)
    searched(made, quick=3, final=9, others={"plain": lambda: None})
    everything = len(configurations(lower(RESIDUAL.program, "bf16")))
    assert made.rounds == [(everything, 1), (everything, 3), (7, 1), (7, 9)]


def test_what_spills_or_fails_is_not_measured(machine):
    def statics(config: Configuration) -> Statics:
        if config.tile == (128, 160):
            return Statics(stages=5, spills=300)
        return Statics(error="no room") if config.tile == (128, 128) else FINE

    made = machine(lambda c: -1.0 if c.tile == (128, 192) else time_of(c))
    found = searched(made, statics)
    assert not {(128, 160), (128, 128)} & {c.tile for c in made.described}
    notes = {c.config.tile: c.note for c in found.candidates if c.times is None}
    assert notes[128, 160] == "spills" and notes[128, 128] == "no room"
    assert "it does not load" in notes[128, 192]
    assert found.best is not None and found.best.config.tile == (128, 208)


def test_if_everything_spills_the_best_of_it_is_found(machine):
    found = searched(machine(time_of), lambda c: Statics(stages=3, spills=500))
    assert found.best is not None and found.best.config.tile == (128, 160)


def test_a_search_that_is_late_still_has_an_answer(machine):
    made = machine(time_of)
    found = searched(made, late=lambda: True)
    assert found.best is not None and len(made.described) == 1
    assert sum(c.note == "not reached" for c in found.candidates) == len(found.candidates) - 1


def test_nothing_that_runs_is_no_answer(machine):
    assert searched(machine(lambda c: -1.0)).best is None


# ------------------------------------------------------------------------------ what is tuned
@pytest.mark.parametrize("name", CATALOG)
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_arrays_have_the_layout_and_the_dtypes_that_are_asked_for(name, layout):
    problem = Problem(CATALOG[name], 64, 16 * CATALOG[name].granule, 32, layout, "fp16")
    a, b, operands = arrays(problem, "cpu")
    assert a.shape == (64, 32) and b.shape[0] == 32
    assert (a.stride(1) == 1) == (layout[0] == "n") and (b.stride(1) == 1) == (layout[1] == "n")
    assert [x.dtype for x in operands] == [DTYPES[d] for d in problem.flat_dtypes]
    flat = (o for o in problem.program.operands for _ in range(1 + (o.kind is Kind.ROTARY)))
    assert len(operands) == len(list(flat))
    assert a.std() > 0.5


def test_a_layer_has_twelve_kernels():
    found = layer_problems(1024, 256, 512, 4, 2)
    assert len(found) == 12
    flops = sum(p.m * p.n * p.k for p in found.values())
    weights = 256 * 256 + 3 * 256 * 512 + 256 * (256 + 2 * 128)
    assert flops == 3 * 1024 * weights
    assert {p.layout for p in found.values()} == {"nt", "nn", "tn"}


def test_the_number_of_heads_makes_no_other_kernel():
    def kernels(heads: int):
        return {fewer_heads(p).program for p in layer_problems(64, 64 * heads, 96, heads, heads)
                .values()}  # fmt: skip

    assert kernels(20) == kernels(40)


def test_a_job_survives_the_way_to_a_worker():
    for config in configurations(lower(RESIDUAL.program, "bf16")):
        job = Job(RESIDUAL, config)
        there = Job.of(json.loads(json.dumps(job.data())))
        assert there.key == job.key and there.config.data() == config.data()
        assert there.problem.flat_dtypes == RESIDUAL.flat_dtypes


def test_known_statics_need_no_worker(tmp_path):
    job = Job(RESIDUAL, Configuration(128, 128, True))
    file = tmp_path / "codetta_statics" / f"{job.key}.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"stages": 5, "spills": 7, "seconds": 1.0, "error": ""}))
    assert compile_all([job, job], tmp_path) == {job.key: Statics(5, 7, 1.0)}


def test_when_there_is_no_time_nothing_is_compiled(tmp_path):
    job = Job(RESIDUAL, Configuration(128, 128, True))
    assert compile_all([job], tmp_path, workers=1, deadline=lambda: True) == {}


# -------------------------------------------------------------------------------- entry points
def test_tuning_without_a_gpu_says_what_is_missing():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    a, b = torch.ones(4, 4), torch.ones(4, 4)
    with pytest.raises(BackendUnavailable, match="there is no CUDA device"):
        codetta.tune(CATALOG["identity"], a, b)
    for arguments in (["residual_ssq"], ["--d", "256", "--f", "512", "--heads", "4"]):
        result = CliRunner().invoke(app, ["tune", *arguments])
        assert isinstance(result.exception, BackendUnavailable)
        assert "there is no CUDA device" in str(result.exception)


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["residual_ssq", "--d", "64"], ["no_such_program"], ["residual_ssq", "--dtype", "fp4"],
        ["residual_ssq", "--layout", "xx"], ["--d", "100", "--f", "8", "--heads", "3"],
        ["--d", "96"], ["swiglu", "--n", "7"],
    ],
)  # fmt: skip
def test_the_command_refuses_what_it_cannot_tune(arguments):
    assert CliRunner().invoke(app, ["tune", *arguments]).exit_code == 2


def test_a_call_without_fused_kernels_has_nothing_to_tune():
    def on_the_cpu() -> None:
        codetta.gemm(torch.ones(4, 4), torch.ones(4, 4))

    with pytest.raises(NothingToTune, match="on_the_cpu"):
        tuning.kernels_of(on_the_cpu, (), {})


def test_the_winner_is_kept_and_used(machine, monkeypatch, tmp_path):
    """From problems to the cache, with made-up kernels."""
    made = machine(time_of)
    monkeypatch.setenv(config_cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(tuning, "compile_all", lambda jobs, cache, **_: {j.key: FINE for j in jobs})
    monkeypatch.setattr(tuning, "_kernel_folder", lambda: tmp_path)
    lines: list[tuple[str, float]] = []
    (result,) = tuning.tuned(
        [RESIDUAL], 60.0, lambda text, share: lines.append((text, share)),
        device=torch.device("meta"), measure=made.measure,
    )  # fmt: skip
    assert result.config.tile == (128, 160) and result.plain_ms == 1.0
    assert result.default_ms is not None and result.default_ms > result.ms
    assert lines[-1][1] == 1.0 and "128x160" in lines[-1][0]
    assert result.code in str(result) and "max_swizzle=16" in result.code
    _, _, operands = arrays(RESIDUAL, "meta")
    key = config_cache.key_of(
        lower(result.problem.program, "bf16"), 256, 512, 64, "nn", operands, {}
    )
    found = config_cache.load(key)
    assert found is not None and found.data() == result.config.data()
    assert result.file is not None and result.file.exists()
