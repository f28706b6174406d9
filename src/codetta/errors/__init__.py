"""Every mistake a user can make has a class here, and the class carries its own fix.

This package is the one table the code and the documentation share: ``docs/errors.md`` is generated
from it (``python tools/error_page.py``), and the test-suite executes each ``wrong`` snippet and
expects exactly that class, then each ``right`` snippet and expects none. A module holds the errors
of one area; users import all of them from here.

Two habits keep the messages useful. The template says what was given, what is allowed and how to
fix it; and an error met while tracing an epilogue ends with the line of the author's function, not
with a line of ours.
"""

from __future__ import annotations

from codetta.errors import (
    backends,
    call,
    candidate,
    epilogue,
    gradients,
    loop,
    loss,
    model,
    plan,
    registry,
)
from codetta.errors.backends import (
    BackendUnavailable,
    BadProcessGroup,
    ColdCapture,
    NothingToTune,
    TooLarge,
    UnknownBackend,
)
from codetta.errors.base import CodettaError, defined_in
from codetta.errors.call import (
    BadOut,
    BadRank,
    BadTile,
    CallError,
    DeviceMismatch,
    DtypeMismatch,
    Fp8Pair,
    InnerMismatch,
    MissingOperand,
    NotAProgram,
    NotATensor,
    NotDivisible,
    OperandDtype,
    OperandShape,
    PositionOutOfRange,
    TooFewColumns,
    UnknownOperand,
    UnsupportedDtype,
    UnsupportedTensor,
)
from codetta.errors.candidate import (
    BadTaskName,
    CandidateDied,
    CandidateError,
    CandidateRaised,
    CandidateTimeout,
    NoCandidateFile,
    NoEpilogue,
    NotWritten,
    ProgramTooLong,
    SeveralEpilogues,
    UnknownCase,
    UnknownTask,
)
from codetta.errors.epilogue import (
    BadAttribute,
    BadGroup,
    BadOutput,
    BadPairLayout,
    BadReduction,
    BooleanValue,
    DataDependentBranch,
    EpilogueError,
    ForeignFunction,
    ForeignValue,
    LayoutMismatch,
    MissingAccumulator,
    MissingAnnotation,
    MissingRule,
    MixedReductions,
    NoOutputs,
    NotIterable,
    ProgramSyntax,
    ReducedValueInTile,
    ReservedName,
    UnknownAnnotation,
    UnusedOperand,
    WidthMismatch,
    WrongOperandKind,
)
from codetta.errors.gradients import (
    DoubleBackward,
    Fp8NeedsNoGrad,
    NotDifferentiable,
    OutNeedsNoGrad,
    RawNeedsNoGrad,
    TransformRefused,
)
from codetta.errors.loop import (
    EndpointFailed,
    LoopError,
    NoEndpoint,
    TraceUnusable,
)
from codetta.errors.loss import (
    LossArguments,
    LossDtypes,
    TargetOutOfRange,
)
from codetta.errors.model import (
    AutocastUnsupported,
    LogitsNotKept,
    MissingPackage,
    PackNeedsModule,
    PackSharded,
    ShardedParameters,
    UnknownGpu,
    UnknownModel,
    UnknownOption,
    UnsupportedModel,
)
from codetta.errors.plan import PlanError, PlanInput, PlanShape
from codetta.errors.registry import (
    NothingRecorded,
    NotPromoted,
    RegistryError,
    RegistryNotWritable,
)

__all__ = [
    "AutocastUnsupported", "BackendUnavailable", "BadAttribute", "BadGroup", "BadOut", "BadOutput",
    "BadPairLayout", "BadProcessGroup", "BadRank", "BadReduction", "BadTaskName", "BadTile",
    "BooleanValue", "CallError", "CandidateDied", "CandidateError", "CandidateRaised",
    "CandidateTimeout", "CodettaError", "ColdCapture", "DataDependentBranch", "DeviceMismatch",
    "DoubleBackward", "DtypeMismatch", "EndpointFailed", "EpilogueError", "ForeignFunction",
    "ForeignValue", "Fp8NeedsNoGrad", "Fp8Pair", "InnerMismatch", "LayoutMismatch", "LogitsNotKept",
    "LoopError", "LossArguments", "LossDtypes", "MissingAccumulator", "MissingAnnotation",
    "MissingOperand", "MissingPackage", "MissingRule", "MixedReductions", "NoCandidateFile",
    "NoEndpoint", "NoEpilogue", "NoOutputs", "NotAProgram", "NotATensor", 
    "NotDifferentiable", "NotDivisible", "NotIterable", "NotPromoted", "NotWritten",
    "NothingRecorded", "NothingToTune", "OperandDtype", "OperandShape", "OutNeedsNoGrad",
    "PackNeedsModule", "PackSharded",
    "PlanError", "PlanInput", "PlanShape", "PositionOutOfRange", "ProgramSyntax", "ProgramTooLong",
    "RawNeedsNoGrad", "ReducedValueInTile", "RegistryError", "RegistryNotWritable", "ReservedName",
    "SeveralEpilogues", "ShardedParameters", "TargetOutOfRange", "TooFewColumns", "TooLarge",
    "TraceUnusable", "TransformRefused", "UnknownAnnotation", "UnknownBackend", "UnknownCase",
    "UnknownGpu", "UnknownModel", "UnknownOperand", "UnknownOption", "UnknownTask",
    "UnsupportedDtype", "UnsupportedModel", "UnsupportedTensor", "UnusedOperand", "WidthMismatch",
    "WrongOperandKind", "catalogue",
]  # fmt: skip

# In the order of the page, which no sorted list of imports can give.
_AREAS = (epilogue, call, gradients, backends, loss, plan, candidate, model, registry, loop)


def catalogue() -> list[type[CodettaError]]:
    """All concrete error classes, area by area, in the order in which they are defined."""
    return [error for area in _AREAS for error in defined_in(area)]
