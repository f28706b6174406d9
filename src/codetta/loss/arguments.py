"""What the loss head accepts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from codetta.arguments import check_tensor
from codetta.errors import (
    BadAttribute,
    BadRank,
    DeviceMismatch,
    LossArguments,
    LossDtypes,
    TargetOutOfRange,
    UnsupportedDtype,
)
from codetta.plan.operator import is_traced

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INDICES = (torch.int32, torch.int64)
_OP = "linear_cross_entropy"


def check(
    x: Any,
    weight: Any,
    target: Any,
    bias: Any,
    token_weight: Any,
    row_scale: Any,
    column_scale: Any,
    reduction: Any,
    num_items: Any,
    smoothing: Any,
    softcap: Any,
    scale: Any,
    z_loss: Any,
    shift: bool,
    chunk: Any,
    schedule: Any,
    limit: Any,
    accum_dtype: Any,
) -> None:
    """Raise a named error unless the arguments fit together; no value of a tensor is read."""
    _numbers(reduction, smoothing, softcap, chunk, schedule)
    if limit is not None and not (type(limit) is int and limit > 0):
        fix = "use a positive number of bytes, or None for 1 GiB"
        raise BadAttribute(op=_OP, attribute="memory_limit", given=limit, fix=fix)
    _constants(softcap=softcap, label_smoothing=smoothing, logit_scale=scale, z_loss=z_loss)
    _together(reduction, num_items, schedule)
    named = {"x": x, "weight": weight, "target": target}
    optional = {"bias": bias, "token_weight": token_weight}
    optional |= {"row_scale": row_scale, "column_scale": column_scale}
    named |= {name: t for name, t in optional.items() if t is not None}
    for name, t in named.items():
        check_tensor(name, t)
    _shapes(x, weight, target, bias, shift)
    _shapes_of_factors(x, token_weight, row_scale, column_scale)
    if isinstance(num_items, Tensor) and num_items.numel() != 1:
        raise BadRank(
            name="num_items_in_batch", given=tuple(num_items.shape), expected="()",
            fix="It is one number.",
        )  # fmt: skip
    for name, t in named.items():
        allowed = INDICES if name == "target" else FLOATS
        if t.dtype not in allowed:
            raise UnsupportedDtype(name=name, given=t.dtype, allowed=_names(allowed))
    if not _has_autocast(x.device.type):
        for name, t in (("weight", weight), ("bias", bias)):
            if t is not None and t.dtype != x.dtype:
                raise LossDtypes(x=x.dtype, name=name, given=t.dtype)
    if any(t.device != x.device for t in named.values()):
        where = ", ".join(f"{name} on {t.device}" for name, t in named.items())
        raise DeviceMismatch(given=where)
    _sums(accum_dtype)


def _numbers(reduction: Any, smoothing: Any, softcap: Any, chunk: Any, schedule: Any) -> None:
    def refuse(attribute: str, given: Any, fix: str) -> None:
        raise BadAttribute(op=_OP, attribute=attribute, given=given, fix=fix)

    if reduction not in ("mean", "sum", "none"):
        refuse("reduction", reduction, "use 'mean', 'sum' or 'none'")
    if not 0 <= smoothing <= 1:
        refuse("label_smoothing", smoothing, "use a number from 0 to 1")
    if softcap is not None and not softcap > 0:
        refuse("softcap", softcap, "use a positive number, or None for no cap")
    if chunk is not None and not (isinstance(chunk, int) and chunk > 0):
        refuse("chunk", chunk, "use a positive number of tokens, or None")
    if schedule not in (None, "forward", "recompute"):
        refuse("schedule", schedule, "use 'forward', 'recompute' or None")


def _constants(**numbers: Any) -> None:
    """They become part of the programs: finite, and not learned."""
    for name, x in numbers.items():
        if isinstance(x, Tensor) and x.requires_grad:
            fix = "use a number, and multiply x or the loss by what is learned; it has no gradient"
        elif x is not None and not -math.inf < x < math.inf:
            fix = "use a finite number"
        else:
            continue
        raise BadAttribute(op=_OP, attribute=name, given=x, fix=fix)


def _sums(accum_dtype: Any) -> None:
    if accum_dtype is not None and accum_dtype is not torch.float32:
        fix = "use None, or torch.float32 for sums over chunks that are never kept in less"
        raise BadAttribute(op=_OP, attribute="accum_dtype", given=accum_dtype, fix=fix)


def _together(reduction: str, num_items: Any, schedule: str | None) -> None:
    if num_items is not None and reduction != "mean":
        raise LossArguments(
            first="num_items_in_batch",
            second=f"reduction={reduction!r}",
            reason="it takes the place of the number of tokens that 'mean' divides by",
            fix="Leave reduction at 'mean', or divide the result yourself.",
        )
    if schedule == "forward" and reduction == "none":
        raise LossArguments(
            first="schedule='forward'",
            second="reduction='none'",
            reason="gradients can be formed in the forward pass only if one number comes from "
            "upstream",
            fix="Use schedule='recompute' or leave it out.",
        )


def _expect(name: str, t: Tensor, good: bool, expected: str, fix: str) -> None:
    if not good:
        raise BadRank(name=name, given=tuple(t.shape), expected=expected, fix=fix)


def _shapes(x: Tensor, weight: Tensor, target: Tensor, bias: Any, shift: bool) -> None:
    _expect("x", x, x.ndim >= 1, "(..., D)", "It is one hidden state per token.")
    d, lead = x.shape[-1], tuple(x.shape[:-1])
    _expect(
        "weight", weight, weight.ndim == 2 and weight.shape[1] == d and weight.shape[0] > 0,
        f"(V, {d})", "It is in nn.Linear layout.",
    )  # fmt: skip
    _expect(
        "target", target, tuple(target.shape) == lead, f"{lead}",
        "It is one token per hidden state; with shift=True too.",
    )  # fmt: skip
    if shift:
        _expect("target", target, target.ndim >= 1, "(..., S)", "shift=True needs a sequence.")
    if bias is not None:
        v = weight.shape[0]
        _expect("bias", bias, tuple(bias.shape) == (v,), f"({v},)", "It is one number per row.")


def _shapes_of_factors(x: Tensor, token_weight: Any, row_scale: Any, column_scale: Any) -> None:
    lead, d = tuple(x.shape[:-1]), x.shape[-1]
    for name, t in (("token_weight", token_weight), ("row_scale", row_scale)):
        if t is not None:
            good = tuple(t.shape) == lead
            _expect(name, t, good, f"{lead}", "It has the shape of the targets.")
    if column_scale is not None:
        good = tuple(column_scale.shape) == (d,)
        _expect("column_scale", column_scale, good, f"({d},)", "It is one number per column of x.")


def check_targets(target: Tensor, valid: Tensor, size: int) -> None:
    """Raise if a target that counts is outside [0, size). Only where looking costs no wait."""
    if torch.compiler.is_compiling() or is_traced(target):
        return
    if target.device.type != "cpu" or target.numel() == 0:
        return
    wrong = valid & ((target < 0) | (target >= size))
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise TargetOutOfRange(count=int(wrong.sum()), given=int(target[at]), at=at, size=size)


def under_autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tensors as nn.Linear sees them under torch.autocast: floats, save fp64, are cast."""
    device = x.device.type
    if not _has_autocast(device):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)

    def cast(t: Tensor) -> Tensor:
        return t if t.dtype is torch.float64 else t.to(dtype)

    x, weight = cast(x), cast(weight)
    bias = None if bias is None else cast(bias)
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != x.dtype:
            raise LossDtypes(x=x.dtype, name=name, given=t.dtype)
    return x, weight, bias


def _has_autocast(device: str) -> bool:
    return _knows_autocast(device) and torch.is_autocast_enabled(device)


def _knows_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


setattr(_knows_autocast, "_dynamo_marked_constant", True)  # noqa: B010  (Dynamo cannot trace it)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
