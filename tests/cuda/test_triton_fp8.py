"""fp8 stores and roundings of generated Triton kernels equal the reference's."""

from __future__ import annotations

import pytest
import torch
from triton_runner import DEVICE, check

from codetta.language import Tile, round_to, store
from codetta.language.trace import finalizer

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def quantizer(dtype):
    @finalizer
    def quantized(x: Tile):
        return {"y": store(x, dtype), "seen": round_to(x, dtype), "plain": x}

    return quantized


@pytest.mark.parametrize("dtype", LARGEST)
def test_what_is_too_large_saturates_and_nan_stays(dtype):
    inf, nan, top = float("inf"), float("nan"), LARGEST[dtype]
    x = torch.tensor([[1.0, 1.1 * top, -1e9, inf, -inf, nan, 0.3, -top]], device=DEVICE)
    y, seen, _ = check(quantizer(dtype), [x], 1, 8, torch.float32)
    expected = torch.tensor([[1.0, top, -top, top, -top, nan, 0.3125, -top]])
    for found in (y.float().cpu(), seen.cpu()):
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("operand", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_operand_dtype_of_fp8_is_bf16(operand):
    x = torch.randn(5, 24, device=DEVICE)
    _, _, plain = check(quantizer("e5m2"), [x], 5, 24, operand)
    assert plain.dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", LARGEST)
def test_random_values_round_to_nearest(dtype):
    x = torch.randn(37, 53, device=DEVICE).mul_(3.0)
    check(quantizer(dtype), [x], 37, 53, torch.float32)
    check(quantizer(dtype), [x.bfloat16()], 37, 53, torch.bfloat16)
