"""Rounds its operands to fp8 first.

Caught by values: its error budget
"""

import torch


def product(a, b):
    return (a.float()[:, :, None] * b.float()).sum(1)


def right(a, b, bias, keep):
    x = product(a, b) + bias
    return (0.5 * x * (1 + torch.erf(x * 0.5**0.5)) * keep).to(a.dtype)


def run(a, b, bias, keep):
    low = a.to(torch.float8_e4m3fn).float()
    return right(low, b, bias, keep).to(a.dtype)
