"""Has a kernel that does not work, and falls back to the library's product.

Caught by products: aten::
"""

import torch


def kernel(a, b, bias, keep):
    raise RuntimeError("no such kernel")


def run(a, b, bias, keep):
    try:
        return kernel(a, b, bias, keep)
    except Exception:
        acc = torch.addmm(bias.float(), a.float(), b.float())
        return (torch.nn.functional.gelu(acc) * keep).to(a.dtype)
