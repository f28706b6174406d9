"""Runs the tests of generated kernels in Triton's interpreter, in a process of its own.

Triton decides between compiler and interpreter when it is imported, so one process cannot do both.
With a GPU the same files run directly.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

FILES = (
    "test_triton_library.py",
    "test_triton_primitives.py",
    "test_triton_prepare.py",
    "test_triton_fixed.py",
    "test_triton_wide.py",
    "test_triton_fp8.py",
    "test_triton_repair.py",
    "test_triton_scale.py",
    "test_triton_shift.py",
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="these files run on the GPU directly")
@pytest.mark.parametrize("file", FILES)
def test_generated_kernels_in_the_interpreter(file):
    triton = pytest.importorskip("triton", reason="generated kernels need Triton")
    if _version(triton) < (3, 9) and _version(numpy) >= (2, 4):
        pytest.skip("this Triton's interpreter needs numpy < 2.4")
    path = Path(__file__).with_name(file)
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(
        command, env=environment, cwd=path.parents[2], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def _version(module) -> tuple[int, ...]:
    return tuple(int(x) for x in module.__version__.split(".")[:2])
