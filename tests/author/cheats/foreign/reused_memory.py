"""Returns the same memory each time, so that earlier results change.

Caught by aliasing: an output of an earlier call
"""

import torch


def product(a, b):
    return (a.float()[:, :, None] * b.float()).sum(1)


def right(a, b, bias, keep):
    x = product(a, b) + bias
    return (0.5 * x * (1 + torch.erf(x * 0.5**0.5)) * keep).to(a.dtype)


OUT = {}


def run(a, b, bias, keep):
    made = right(a, b, bias, keep).detach()
    key = (made.shape, made.dtype)
    OUT.setdefault(key, torch.empty_like(made)).copy_(made)
    return OUT[key]
