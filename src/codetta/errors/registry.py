"""Recorded programs."""

from __future__ import annotations

from codetta.errors.base import CodettaError


class RegistryError(CodettaError):
    """Programs are promoted to a registry after they have been verified, and read from it."""


class NotPromoted(RegistryError, ValueError):
    template = "{file} is not promoted: {stage} {verdict}: {reason}. {fix}"
    wrong = ""
    right = ""


class NothingRecorded(RegistryError, LookupError):
    template = (
        "no program is recorded for task {task!r}{dtype}; recorded are {known}. Write one "
        "(`codetta new {task}`), and `codetta promote` it once it is verified."
    )
    wrong = "codetta.programs.recorded('bias_gelu_mask', dtype='float64')"
    right = "codetta.gemm(a, b, codetta.programs.relu_squared)"


class RegistryNotWritable(RegistryError, RuntimeError):
    template = (
        "{file} cannot be written: {reason}. Name a file that can in the environment variable "
        "CODETTA_REGISTRY."
    )
    wrong = (
        "import os\n"
        "from codetta.author import records\n"
        "os.environ['CODETTA_REGISTRY'] = os.devnull + '/registry.jsonl'\n"
        "try:\n"
        "    records.append(None)\n"
        "finally:\n"
        "    del os.environ['CODETTA_REGISTRY']"
    )
    right = "from codetta.author import records\nassert records.user_file().suffix == '.jsonl'"
