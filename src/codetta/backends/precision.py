"""How fp8 products accumulate on the fused backend.

Hopper's fp8 tensor cores add the products of one instruction with 14 bits or so and keep what they
add to in registers of that precision; see DeepSeek-AI, arXiv 2412.19437, section 3.5.2. 'fast'
leaves the whole sum over K there, as ``torch._scaled_mm(use_fast_accum=True)`` does: the relative
error of a sum of K random products is about 1e-3, little beside that of the quantization (2^-4 per
element of e4m3), but it grows with K where products have one sign. 'full' moves the sum to fp32
registers after every 128 products; those registers are then missing in the epilogue, and the kernel
is several times slower. The reference backend accumulates in fp32 whatever is chosen.
"""

from __future__ import annotations

from contextvars import ContextVar
from types import TracebackType

from codetta.errors import BadAttribute

NAMES = ("fast", "full")
_FAST: ContextVar[bool] = ContextVar("codetta_fp8_fast", default=True)


class fp8_accumulation:
    """Choose how fp8 products accumulate, for good or for the duration of a ``with`` block.

        with codetta.fp8_accumulation("full"):
            codetta.gemm(a, b, programs.fp8_scaled, sa=sa, sb=sb)

    'fast' (the default) or 'full'; see :mod:`codetta.backends.precision`. Follows the rules of
    ``contextvars``, as :class:`codetta.use_backend` does.

    Raises:
        BadAttribute: not one of the names.
    """

    def __init__(self, name: str) -> None:
        if name not in NAMES:
            raise BadAttribute(
                op="fp8_accumulation", attribute="name", given=name, fix="use 'fast' or 'full'"
            )
        self._token = _FAST.set(name == "fast")

    def __enter__(self) -> fp8_accumulation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _FAST.reset(self._token)


def fp8_fast() -> bool:
    """Whether fp8 products accumulate in the tensor cores alone."""
    return _FAST.get()
