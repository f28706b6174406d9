"""Right outputs with a gradient of zeros.

Caught by values: gradient of
"""

import torch


def product(a, b):
    return (a.float()[:, :, None] * b.float()).sum(1)


def right(a, b, bias, keep):
    x = product(a, b) + bias
    return (0.5 * x * (1 + torch.erf(x * 0.5**0.5)) * keep).to(a.dtype)


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, bias, keep):
        ctx.like = [torch.zeros_like(x) for x in (a, b, bias)]
        return right(a, b, bias, keep)

    @staticmethod
    def backward(ctx, d):
        return (*ctx.like, None)


def run(a, b, bias, keep):
    return Kernel.apply(a, b, bias, keep)
