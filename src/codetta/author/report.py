"""What every author command says: a list of stages, each passed or not, with facts and a next step.

The same object is printed for a person (:func:`codetta.author.render.render`), and dumped as JSON
with a stable schema (``Report.model_dump_json``; docs/author-json.md documents the fields).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, WithJsonSchema

SCHEMA_VERSION = 1
#: A warning is right and slow; an estimate was not measured; noise is too close to call.
Verdict = Literal["passed", "failed", "skipped", "warning", "noise", "estimate"]

#: A float as JSON has it, non-finite ones as words.
Number = Annotated[
    float,
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}),
]


class _Frozen(BaseModel):
    # JSON has no NaN: it is the string "NaN", and infinities are "Infinity" and "-Infinity".
    model_config = ConfigDict(
        frozen=True, ser_json_inf_nan="strings", use_attribute_docstrings=True
    )


class Where(_Frozen):
    """The first wrong element: its tile, its coordinate, what was expected and what came."""

    tensor: str
    """Its name: an output, or d_ and the name of what it is the gradient of."""
    tile: tuple[int, ...]
    """Number of its tile along each axis."""
    index: tuple[int, ...]
    """Its row and column, or its one coordinate."""
    expected: Number
    """By the oracle."""
    got: Number
    """By the program."""


class TensorError(_Frozen):
    """How far one tensor is from the oracle: error and budget are Frobenius norms."""

    tensor: str
    """Its name."""
    error: Number
    """Norm of its difference from the oracle."""
    budget: Number
    """The most it may be."""

    @property
    def ratio(self) -> float:
        return (
            self.error / self.budget if self.budget else (0.0 if self.error == 0 else float("inf"))
        )


class Stage(_Frozen):
    """One step of a command."""

    name: str
    """Such as trace, shapes, fuzz, gradients."""
    verdict: Verdict
    """passed; failed; skipped; warning: right and slow; noise: too close to call; estimate: by the
    cost model, not measured."""
    reason: str = ""
    """Why it failed, was skipped or is a warning, in one line; empty if it passed."""
    fix: str = ""
    """What to do about it; may hold lines of code."""
    facts: dict[str, Any] = {}
    """Numbers and words by name."""
    where: Where | None = None
    """The first wrong element."""
    worst: tuple[TensorError, ...] = ()
    """The worst tensors, worst first."""
    replay: str = ""
    """The shell command that repeats exactly this failure."""


class Report(_Frozen):
    """Of one command on one file."""

    schema_version: int = SCHEMA_VERSION
    """Raised when a field changes its meaning or goes; fields may be added without."""
    command: str
    """check, verify, bench, profile or promote."""
    file: str
    """Path of the candidate, as given."""
    task: str
    """Name of the task; empty if there is no telling."""
    source_sha256: str = ""
    """Of the file's bytes; empty if it did not trace."""
    program_sha256: str = ""
    """Of the program's canonical text."""
    program: str = ""
    """The canonical text: what is judged."""
    seed: int | None = None
    """Of everything that is drawn at random; null where nothing is."""
    environment: dict[str, str] = {}
    """Versions and machine, by name."""
    stages: tuple[Stage, ...] = ()
    """In the order in which they ran."""
    elapsed_s: float = 0.0
    """Seconds it took."""

    @property
    def passed(self) -> bool:
        return bool(self.stages) and all(s.verdict != "failed" for s in self.stages)

    @property
    def exit_status(self) -> int:
        """0: passed; 1: the file is wrong or slow. (2: wrong use, which makes no report.)"""
        return 0 if self.passed else 1
