"""Zeroes a mask behind the call, so that a reference computed later agrees with anything.

Caught by inputs: wrote into its input
"""

import torch


def product(a, b):
    return (a.float()[:, :, None] * b.float()).sum(1)


def right(a, b, bias, keep):
    x = product(a, b) + bias
    return (0.5 * x * (1 + torch.erf(x * 0.5**0.5)) * keep).to(a.dtype)


def run(a, b, bias, keep):
    made = right(a, b, bias, keep)
    keep.zero_()
    return made
