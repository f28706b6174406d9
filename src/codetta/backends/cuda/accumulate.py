"""target += a @ b.

An fp32 target is added to by the store itself (TMA's reduce-add), which reads nothing. A 16-bit
target is loaded as C and stored as D of the same tile, so that product and sum are rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from codetta.backends.cuda import arrays
from codetta.backends.cuda.assembly import fp8_options
from codetta.backends.cuda.configs import choose, layout_of
from codetta.backends.cuda.feeds import sides
from codetta.backends.cuda.launch import DTYPES, accumulator
from codetta.backends.cuda.lowering import lower
from codetta.language import Program, Tile, epilogue, store


@epilogue
def bf16_sum(acc, target: Tile):  # type: ignore[no-untyped-def, valid-type]
    return store(acc + target, "bf16")


@epilogue
def fp16_sum(acc, target: Tile):  # type: ignore[no-untyped-def, valid-type]
    return store(acc + target, "fp16")


_PROGRAMS: dict[torch.dtype, Program] = {
    torch.float32: accumulator,
    torch.bfloat16: bf16_sum,
    torch.float16: fp16_sum,
}


def accumulate_(target: Tensor, a: Tensor, b: Tensor) -> bool:
    """Add a @ b to target in place; False, with nothing done, if this is not the place for it."""
    if target.dtype not in _PROGRAMS or not arrays.is_matrix(target, either=True):
        return False
    from codetta.backends.cuda import plans, quack

    feed_a, feed_b = sides(a, b)
    a, b = feed_a(a), feed_b(b)
    lowered = lower(_PROGRAMS[target.dtype], DTYPES[a.dtype])
    sizes = a.shape[0], b.shape[1], a.shape[1]
    config = choose(lowered, *sizes, layout_of(a, b), device=a.device.index)
    assert config is not None
    add = target.dtype is torch.float32
    c = None if add else target
    options = fp8_options(a) | {"program": "gemm_accumulate_"}
    made = plans.kernel(lowered.source, config, a, b, target, c, {}, add_to_output=add, **options)
    quack.launch(made, a, b, target, c, {})
    return True
