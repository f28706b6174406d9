"""A gradient times a number on the device."""

from __future__ import annotations

import pytest
import torch
from triton_runner import DEVICE

from codetta.backends.cuda.triton_scale import scale_


@pytest.mark.parametrize("factor", [1.0, 1 / 3, 0.0, float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0, 1, 5000])
def test_is_the_product_rounded_once(size, dtype, factor):
    torch.manual_seed(0)
    x, s = torch.randn(size, device=DEVICE).to(dtype), torch.tensor(factor, device=DEVICE)
    expected = (x.float() * factor).to(dtype)
    made = scale_(x, s)
    assert made is x
    torch.testing.assert_close(x, expected, rtol=1e-6, atol=0.0, equal_nan=True)
