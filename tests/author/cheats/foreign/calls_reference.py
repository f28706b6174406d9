"""Evaluates the task's reference.

Caught by products: aten::mm
"""

from codetta.author.task import find

reference = find("bias_gelu_mask").reference


def run(a, b, bias, keep):
    return reference((a.float() @ b.float()), bias, keep)["y"].to(a.dtype)
