"""Returns at once and lets a thread do the work.

Caught by late|threads|values:
"""

import threading
import time

import torch


def product(a, b):
    return (a.float()[:, :, None] * b.float()).sum(1)


def right(a, b, bias, keep):
    x = product(a, b) + bias
    return (0.5 * x * (1 + torch.erf(x * 0.5**0.5)) * keep).to(a.dtype)


def run(a, b, bias, keep):
    out = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)

    def work():
        time.sleep(0.01)
        out.copy_(right(a, b, bias, keep))

    threading.Thread(target=work).start()
    return out
