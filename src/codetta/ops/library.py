"""The library operators: ``gemm``, ``pointwise``, ``gemm_accumulate_`` and ``gemm_short_sum_``.

Their arguments are a program's canonical text and plain tensors, so that a compiled graph, a
dispatch trace and a serialized graph all show what runs. They are defined through a raw
``torch.library.Library``: a ``custom_op`` costs more than ten times as much per call.

Every kernel switches autocast off: the caller has chosen the dtypes, and a matmul inside must not
be cast again. Results are fresh tensors, laid out as :mod:`codetta.backends.layout` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from codetta.backends.layout import compute_dtype, fake_results, parsed
from codetta.backends.select import backend_for
from codetta.ops.inductor import register_fake

_LIBRARY = torch.library.Library("codetta", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)

_LIBRARY.define(
    "gemm(str program, Tensor a, Tensor b, Tensor[] operands, int[] tile, bool raw) -> Tensor[]",
    tags=_TAGS,
)
_LIBRARY.define(
    "pointwise(str program, Tensor[] operands, SymInt m, SymInt n, ScalarType operand_dtype, "
    "ScalarType compute_dtype, int[] tile, bool raw) -> Tensor[]",
    tags=_TAGS,
)
_LIBRARY.define("gemm_accumulate_(Tensor(a!) target, Tensor a, Tensor b) -> ()", tags=_TAGS)
_LIBRARY.define(
    "gemm_short_sum_(Tensor(a!) high, Tensor(b!) low, Tensor a, Tensor b, "
    "int bits, bool first, bool last) -> ()",
    tags=_TAGS,
)


# --------------------------------------------------------------------------------- kernels
def _gemm(
    program: str, a: Tensor, b: Tensor, operands: Sequence[Tensor], tile: Sequence[int], raw: bool
) -> list[Tensor]:
    if torch.is_autocast_enabled(a.device.type):
        with torch.autocast(a.device.type, enabled=False):
            return _gemm(program, a, b, operands, tile, raw)
    return backend_for(a).gemm(parsed(program), a, b, operands, _tile(tile), raw)


def _pointwise(
    program: str,
    operands: Sequence[Tensor],
    m: int,
    n: int,
    operand_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    tile: Sequence[int],
    raw: bool,
) -> list[Tensor]:
    x = operands[0]
    return backend_for(x).pointwise(
        parsed(program), operands, m, n, operand_dtype, compute_dtype, _tile(tile), raw
    )


def _gemm_accumulate_(target: Tensor, a: Tensor, b: Tensor) -> None:
    if torch.is_autocast_enabled(a.device.type):
        with torch.autocast(a.device.type, enabled=False):
            return _gemm_accumulate_(target, a, b)
    return backend_for(a).gemm_accumulate_(target, a, b)


def _gemm_short_sum_(
    high: Tensor, low: Tensor, a: Tensor, b: Tensor, bits: int, first: bool, last: bool
) -> None:
    if torch.is_autocast_enabled(a.device.type):
        with torch.autocast(a.device.type, enabled=False):
            return _gemm_short_sum_(high, low, a, b, bits, first, last)
    return backend_for(a).gemm_short_sum_(high, low, a, b, bits, first, last)


def _tile(tile: Sequence[int]) -> tuple[int, int] | None:
    return (tile[0], tile[1]) if tile else None


for _name, _kernel in {
    "gemm": _gemm, "pointwise": _pointwise, "gemm_accumulate_": _gemm_accumulate_,
    "gemm_short_sum_": _gemm_short_sum_,
}.items():  # fmt: skip
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")


# ------------------------------------------------------------------------------ fake kernels
@register_fake("gemm", _LIBRARY)
def _gemm_fake(
    program: str, a: Tensor, b: Tensor, operands: Sequence[Tensor], tile: Sequence[int], raw: bool
) -> list[Tensor]:
    compute = compute_dtype(a.dtype, operands)
    m, n = a.shape[0], b.shape[1]
    return fake_results(parsed(program), a, m, n, a.dtype, compute, tile, raw)


@register_fake("pointwise", _LIBRARY)
def _pointwise_fake(
    program: str,
    operands: Sequence[Tensor],
    m: Any,
    n: Any,
    operand_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    tile: Sequence[int],
    raw: bool,
) -> list[Tensor]:
    return fake_results(parsed(program), operands[0], m, n, operand_dtype, compute_dtype, tile, raw)


@register_fake("gemm_accumulate_", _LIBRARY)
def _gemm_accumulate_fake(target: Tensor, a: Tensor, b: Tensor) -> None:
    return None


@register_fake("gemm_short_sum_", _LIBRARY)
def _gemm_short_sum_fake(
    high: Tensor, low: Tensor, a: Tensor, b: Tensor, bits: int, first: bool, last: bool
) -> None:
    return None


GEMM: Any = torch.ops.codetta.gemm.default
POINTWISE: Any = torch.ops.codetta.pointwise.default
GEMM_ACCUMULATE_: Any = torch.ops.codetta.gemm_accumulate_.default
GEMM_SHORT_SUM_: Any = torch.ops.codetta.gemm_short_sum_.default


# ---------------------------------------------------------------------------------- autograd
# Imported on the first call: codetta.autograd needs the operators.
def _gemm_autograd(*arguments: Any) -> Any:
    from codetta.autograd import gemm_autograd

    return gemm_autograd(*arguments)


def _pointwise_autograd(*arguments: Any) -> Any:
    from codetta.autograd import pointwise_autograd

    return pointwise_autograd(*arguments)


def _gemm_accumulate_autograd(*arguments: Any) -> Any:
    from codetta.autograd import gemm_accumulate_autograd

    return gemm_accumulate_autograd(*arguments)


for _name, _kernel in {
    "gemm": _gemm_autograd,
    "pointwise": _pointwise_autograd,
    "gemm_accumulate_": _gemm_accumulate_autograd,
}.items():
    _LIBRARY.impl(_name, _kernel, "Autograd")
