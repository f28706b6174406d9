"""NaN, for comparisons in which it equals everything.

Caught by values: is NaN where the reference is not
"""

import torch


def product(a, b):
    return (a.float()[:, :, None] * b.float()).sum(1)


def right(a, b, bias, keep):
    x = product(a, b) + bias
    return (0.5 * x * (1 + torch.erf(x * 0.5**0.5)) * keep).to(a.dtype)


def run(a, b, bias, keep):
    return torch.full((a.shape[0], b.shape[1]), float("nan"), dtype=a.dtype)
