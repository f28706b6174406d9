"""A candidate against its task's oracle: is what it computes right, on anything that may come?

What runs is the Program that was parsed from the candidate's text, never the author's Python. Each
stage makes some of the calls that :mod:`.cases` derives from the seed, every call is watched by
:mod:`.calls`, every tensor judged by :mod:`.judge` within the budget of :mod:`.oracle`. After the
first stage that fails, the others are skipped: they would fail for the same reason.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from codetta.author import checks
from codetta.author.calls import CHECKS, Caller, Fault
from codetta.author.candidate import task_of
from codetta.author.cases import STAGES, cases, named_case
from codetta.author.check import traced
from codetta.author.contract import contract
from codetta.author.draws import Case
from codetta.author.integrity import fingerprint
from codetta.author.power import Outcome, toothless, tried
from codetta.author.report import Report, Stage, TensorError
from codetta.author.surroundings import environment
from codetta.author.task import Task
from codetta.backends.select import default_backend, use_backend
from codetta.language.program import Program

_SHOWN = 3  # worst tensors of a stage
Progress = Callable[[str], None]


def verify_candidate(
    path: str | Path,
    task: str | Task | None = None,
    *,
    seed: int | None = None,
    backend: str = "auto",
    case: str | None = None,
    quick: bool = False,
    progress: Progress = lambda text: None,
) -> Report:
    """Run a candidate against its task.

    Args:
        task: a name, a path or a Task; the candidate's own by default.
        seed: of all data and sizes; random by default, and in the report.
        backend: "auto", "reference" or "cuda".
        case: run this case alone; failed stages name theirs.
        quick: a third of the fuzzed, special, tile and gradient cases.

    Raises:
        NoCandidateFile, UnknownTask, UnknownCase: there is no such thing.
        BackendUnavailable: ``backend`` cannot run here.
    """
    begun = time.monotonic()
    path = Path(path)
    harness = fingerprint()
    trace, candidate = traced(path)
    seed = int.from_bytes(os.urandom(4), "big") if seed is None else seed
    stages, used, asked = [_untouched(harness), trace], {}, None
    if candidate is not None:
        asked = task_of(candidate, task)
        if case is not None:
            named_case(asked, seed, case)
        stages.append(contract(candidate.program, asked))
        replay = _replay(path, task if isinstance(task, str) else "", seed, backend)
        with _on(backend) as device:
            used = {"backend": "cuda" if device.type == "cuda" else "reference"}
            run = Run(candidate.program, asked, seed, device, replay, quick, case, progress)
            if all(s.verdict == "passed" for s in stages):
                stages += run.stages()
    if len(stages) < 4:
        stages += [_after_failure(name) for name in (*STAGES, *CHECKS, "power")]
    return Report(
        command="verify",
        file=str(path),
        task=asked.name if asked else "",
        source_sha256=candidate.source_sha256 if candidate else "",
        program_sha256=candidate.program_sha256 if candidate else "",
        program=candidate.program.text if candidate else "",
        seed=seed,
        environment=environment() | used,
        stages=tuple(stages),
        elapsed_s=round(time.monotonic() - begun, 2),
    )


@contextmanager
def _on(backend: str) -> Iterator[torch.device]:
    """The backend in force, and the device of its tensors."""
    with use_backend(backend), warnings.catch_warnings():
        fused = default_backend() == "cuda"
        # fp32 calls run on the reference there, which it says once.
        warnings.filterwarnings("ignore", ".*run on the reference backend", UserWarning)
        yield torch.device("cuda", torch.cuda.current_device()) if fused else torch.device("cpu")


def _replay(path: Path, task: str, seed: int, backend: str) -> str:
    words = ["codetta verify", str(path)]
    words += [f"--task {task}"] if task else []
    words += [f"--backend {backend}"] if backend != "auto" else []
    return " ".join([*words, f"--seed {seed} --case "])


def _untouched(before: str) -> Stage:
    """Nothing of what judges was changed while the candidate's Python ran."""
    if fingerprint() == before:
        return Stage(name="harness", verdict="passed")
    return Stage(
        name="harness",
        verdict="failed",
        reason="files of the harness changed while the candidate was traced",
        fix="a candidate may not touch what judges it; reinstall codetta",
    )


def _after_failure(name: str) -> Stage:
    return Stage(name=name, verdict="skipped", reason="a stage before it failed")


# ------------------------------------------------------------------------------- the stages
@dataclass
class Run:
    """The calls of one verification, and what was found."""

    program: Program
    task: Task
    seed: int
    device: torch.device
    replay: str
    quick: bool
    only: str | None
    progress: Progress
    faults: dict[str, tuple[Case, Fault]] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    calls: int = 0

    def stages(self) -> list[Stage]:
        """Of all calls, then one per check that every call went through, then the self-check."""
        caller = Caller(self.program, self.task)
        listed = cases(self.task, self.seed, self.quick and self.only is None)
        made = []
        for name in STAGES:
            if self.faults:
                made.append(_after_failure(name))
                continue
            wanted = [c for c in listed[name] if self.only in (None, c.name)]
            made.append(self.stage(caller, name, wanted))
        made += [self.check(name) for name in CHECKS]
        made.append(self.power())
        return made

    def stage(self, caller: Caller, name: str, listed: list[Case]) -> Stage:
        if not listed:
            return Stage(name=name, verdict="skipped", reason=self.why_none(name))
        worst: list[TensorError] = []
        facts: dict[str, object] = {"cases": len(listed)}
        failed: list[tuple[Case, Fault]] = []
        for i, case in enumerate(listed):
            self.progress(f"{name} {i + 1} of {len(listed)}")
            self.calls += 1
            try:
                found = checks.CHECK[name](caller, case, self.seed, self.device)
            except Fault as fault:
                failed.append((case, fault))
                continue
            worst += [_named(j.error, case) for j in found.judged]
            facts |= found.facts
            if found.outcome is not None:
                self.outcomes.append(found.outcome)
        for found_at, what in failed:
            if what.check in CHECKS:
                self.faults.setdefault(what.check, (found_at, what))
        wrong = [(c, f) for c, f in failed if f.check not in CHECKS]
        if wrong:
            self.faults.setdefault(name, wrong[0])
            return self.failed(name, wrong, len(listed))
        worst.sort(key=lambda e: -e.ratio)
        return Stage(name=name, verdict="passed", facts=facts, worst=tuple(worst[:_SHOWN]))

    def failed(self, name: str, wrong: list[tuple[Case, Fault]], count: int) -> Stage:
        case, fault = wrong[0]
        judged = sorted(fault.judged, key=lambda j: -j.error.ratio)
        bad = [j for j in judged if j.reason]
        facts: dict[str, object] = {"case": f"{case.name} ({case.described})"}
        if count > 1:
            facts["failed"] = f"{len(wrong)} of {count} cases: " + ", ".join(
                c.name.partition("/")[2] for c, _ in wrong[:6]
            )
        return Stage(
            name=name,
            verdict="failed",
            reason=fault.reason,
            fix=fault.fix or checks.FIX.get(name, ""),
            facts=facts,
            where=bad[0].where if bad else None,
            worst=tuple(j.error for j in judged[:_SHOWN]),
            replay=self.replay + case.name,
        )

    def why_none(self, name: str) -> str:
        if self.only is not None:
            return f"only {self.only} was asked for"
        return "the task asks for no gradient" if name == "gradients" else "no cases"

    def check(self, name: str) -> Stage:
        if name in self.faults:
            case, fault = self.faults[name]
            return self.failed(name, [(case, fault)], 1)
        if self.faults:
            return _after_failure(name)
        return Stage(name=name, verdict="passed", facts={"calls": self.calls})

    def power(self) -> Stage:
        """The verification must reject wrong results at this task's data."""
        if self.faults:
            return _after_failure("power")
        if self.only is not None or not self.outcomes:
            return Stage(name="power", verdict="skipped", reason=self.why_none("power"))
        loose = toothless(self.outcomes)
        if loose:
            return Stage(
                name="power",
                verdict="failed",
                reason=f"the task is too loose to tell right from wrong: {'; '.join(loose[:3])}",
                fix="mend the task: its data leaves an output (nearly) constant, or drowns it",
            )
        facts = {"wrong results rejected": len(tried(self.outcomes))}
        return Stage(name="power", verdict="passed", facts=facts)


def _named(error: TensorError, case: Case) -> TensorError:
    return error.model_copy(update={"tensor": f"{error.tensor} in {case.name}"})
