"""Training text that every machine has: source files of Python's own standard library.

Real text with real structure, no download, no licence question. The list of files is fixed, so one
version of Python always gives the same text; the demo's JSON holds its hash, because other
versions have other sources.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from codetta.errors import CodettaError

_FILES = (
    "heapq.py",
    "bisect.py",
    "textwrap.py",
    "fractions.py",
    "statistics.py",
    "functools.py",
    "dataclasses.py",
    "argparse.py",
)


class TextUnavailable(CodettaError, RuntimeError):
    """The standard library's sources are not on this machine."""

    template = (
        "the demo trains on source files of Python's standard library, and {missing} cannot be "
        "read under {directory}. Run it with a Python that ships its sources (python.org, a Linux "
        "distribution, conda or uv all do; some embedded builds do not)."
    )


def standard_library_text(directory: Path | None = None) -> str:
    """The listed source files, one after another."""
    directory = directory or Path(sysconfig.get_paths()["stdlib"])
    parts = []
    for name in _FILES:
        try:
            parts.append((directory / name).read_text(encoding="utf-8"))
        except OSError as error:
            raise TextUnavailable(missing=name, directory=directory) from error
    return "\n".join(parts)


def batches(
    text: str,
    encode: Callable[[str], Sequence[int]],
    *,
    distinct: int,
    batch: int,
    seq_len: int,
    seed: int,
) -> list[torch.Tensor]:
    """`distinct` int64 tensors (batch, seq_len), non-overlapping stretches of the text.

    The seed decides which stretches, and nothing else does. Text that is too short is repeated.
    """
    needed = distinct * batch
    tokens = torch.tensor(encode(text), dtype=torch.int64)
    repeats = -(-needed * seq_len // tokens.numel())
    windows = tokens.repeat(repeats).unfold(0, seq_len, seq_len)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(windows.shape[0], generator=generator)[:needed]
    return list(windows[chosen].reshape(distinct, batch, seq_len).unbind())
