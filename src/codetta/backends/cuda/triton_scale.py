"""x *= s in place for a number s on the device, which costs nothing but a launch where s is 1.

The upstream gradient of a loss is 1 in most training steps, but only the device knows. PyTorch's
kernel for a 16-bit tensor times a 0-d tensor of another dtype is not vectorized: it took 1.2 ms for
the 0.6 GB of a large head's gradients.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from codetta.backends.cuda.capture import refuse
from codetta.backends.cuda.triton_kernels import on_device

_BLOCK = 4096
_SEEN: set[tuple[object, ...]] = set()


@triton.jit
def _scale(x, s, count, BLOCK: tl.constexpr):
    factor = tl.load(s)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        value = tl.load(x + at, mask=inside).to(tl.float32) * factor
        tl.store(x + at, value.to(x.dtype.element_ty), mask=inside)


def scale_(x: Tensor, s: Tensor) -> Tensor:
    """x times the 0-d fp32 tensor s, rounded once, in place.

    Args:
        x: contiguous, in fp32 or 16 bits.

    Raises:
        ColdCapture: the kernel must be compiled and a stream is being captured.
    """
    key = (x.dtype, x.device, x.numel() % 16 == 0, x.numel() == 1)  # what Triton compiles anew for
    if key not in _SEEN:
        refuse("a scaled gradient")
        _SEEN.add(key)
    if x.numel():
        with on_device(x):
            _scale[(triton.cdiv(x.numel(), _BLOCK),)](x, s, x.numel(), BLOCK=_BLOCK)
    return x
