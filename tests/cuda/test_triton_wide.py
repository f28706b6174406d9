"""Generated kernels address beyond 2^31 elements; run on a GPU or in Triton's interpreter.

The memory is only reserved: a handful of its elements is ever touched.
"""

from __future__ import annotations

import pytest
import torch
from triton_runner import DEVICE, check

from codetta import programs
from codetta.backends.cuda.pointwise import accumulator_loaded

COPY = accumulator_loaded(programs.identity)


@pytest.mark.parametrize("far", ["rows", "columns"])
def test_strides_reach_beyond_32_bits(far):
    n, step = (16, 2**30 + 16) if far == "rows" else (3, 2**30 + 16)
    try:
        memory = torch.empty(2 * step + 64, dtype=torch.bfloat16, device=DEVICE)
    except RuntimeError:
        pytest.skip("no four GiB to reserve")
    stride = (step, 1) if far == "rows" else (1, step)
    x = memory.as_strided((3, n), stride)
    x.copy_(torch.arange(3 * n).reshape(3, n))
    check(COPY, [x], 3, n, torch.bfloat16)
