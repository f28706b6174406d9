"""A task, candidates for it and a clock that ticks as it is told: no GPU and no waiting."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import codetta
from codetta.author.candidate import Candidate
from codetta.author.report import Report, Stage, TensorError
from codetta.author.task import Task, TaskOperand, TaskOutput, Workload
from codetta.language import Row, Tile
from codetta.tuning.timing import Times

SMALL = Workload(64, 32, 16)


def reference(acc, bias, residual):
    return {"y": acc + bias + residual}


TASK = Task(
    name="biased_sum",
    title="Linear with bias, added to the residual stream",
    level="easy",
    formula="y = acc + bias + residual",
    operands=(TaskOperand("bias", "row", "bias"), TaskOperand("residual", "tile", "stream")),
    outputs=(TaskOutput("y", "tile", "stream, continued"),),
    reference=reference,
    benchmark=(SMALL, Workload(128, 64, 32)),
)


@codetta.epilogue
def right(acc, bias: Row, residual: Tile):
    return {"y": acc + bias + residual}


@codetta.epilogue
def wrong(acc, bias: Row, residual: Tile):
    return {"y": acc + bias + residual * 0.5}


def candidate(tmp_path: Path, program=right) -> Candidate:
    path = tmp_path / "candidate.py"
    if not path.exists():
        path.write_text("# whatever was traced\n")
    source = hashlib.sha256(path.read_bytes()).hexdigest()
    return Candidate(path, TASK.name, program, source, program.digest)


def tracing(made):
    """Stands for tracing a file, which takes a process."""
    return lambda path: (Stage(name="trace", verdict="passed"), made)


def verified(made: Candidate, verdict="passed", **changed) -> Report:
    """What a verification says."""
    errors = (TensorError(tensor="y", error=0.5, budget=2.0),)
    stages = (
        Stage(name="workloads", verdict="passed", worst=errors),
        Stage(name="fuzz", verdict=verdict, reason="" if verdict == "passed" else "y is wrong",
              fix="" if verdict == "passed" else "compute y", worst=errors,
              replay="codetta verify candidate.py --seed 1 --case fuzz-3"),
    )  # fmt: skip
    found = Report(
        command="verify", file=str(made.path), task=made.task, stages=stages,
        source_sha256=made.source_sha256, program_sha256=made.program_sha256,
    )  # fmt: skip
    return found.model_copy(update=changed)


class Clock:
    """Runs what it times, and says what it was told: milliseconds by name, with noise."""

    def __init__(self, noise=0.01, **ms):
        self.ms, self.noise = ms, noise
        self.random = random.Random(1)
        self.calls = 0

    def __call__(self, runs, count):
        found = {name: Times() for name in runs}
        for _ in range(count):
            drift = 1 + 0.1 * self.random.random()  # common to a round: clocks, temperature
            for name, run in runs.items():
                if self.calls == 0:
                    run()
                own = 1 + self.noise * (self.random.random() - 0.5)
                found[name].ms.append(self.ms[name] * drift * own)
        self.calls += 1
        return found
