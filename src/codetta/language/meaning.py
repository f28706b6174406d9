"""MEANING and REDUCTION: what every primitive computes, in plain PyTorch.

These entries are the executable specification. All arrays are two-dimensional: a tile is (M, C), a
column vector (M, 1), a row vector (1, C), a scalar (1, 1), so PyTorch's broadcasting is the
language's. Values are already in the compute dtype (fp32 or wider).

A reduction is three things: the components of its state, the partial of one tile, and the combine
over tiles. Partials see tiles as (M, T, w) with a mask for the padding of the last tile, so nothing
outside the matrix can reach a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from codetta.language.primitives import COL_REDUCTIONS, MEANING, REDUCTION
from codetta.language.types import parse_pairs

Attrs = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Context:
    """Sizes and dtypes of one execution: M, N, the dtype of a, and the compute dtype.

    Plans use n = 1, because there the widths are the numbers of columns themselves.
    """

    m: int
    n: int
    operand: torch.dtype
    compute: torch.dtype
    device: torch.device

    def cols(self, width: int | float | Fraction) -> int:
        exact = width if isinstance(width, Fraction) else Fraction(width)
        return self.n * exact.numerator // exact.denominator

    def rows(self, rows: int | str) -> int:
        return self.m if rows == "M" else int(rows)

    def dtype(self, name: str) -> torch.dtype:
        """Storage dtype by its name in the language."""
        if name == "operand":
            return operand_storage(self.operand)
        if name == "accumulator":
            return self.compute
        return NAMED_DTYPES[name]


NAMED_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def operand_storage(a: torch.dtype) -> torch.dtype:
    """What 'operand' stands for where a has this dtype: fp8 products are stored in bf16."""
    return torch.bfloat16 if a in FP8 else a


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to nearest in a storage dtype. fp8 saturates, as the conversion of GPUs does (what
    the cast of PyTorch makes of too large numbers depends on its version); NaN stays NaN."""
    if dtype in FP8:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


# ---------------------------------------------------------------------------- elementwise
for _name, _function in {
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
    "where": torch.where,
}.items():
    MEANING.rule(_name)(lambda ctx, attrs, *xs, _f=_function: _f(*xs))


@MEANING.rule("pow")
def _pow(ctx: Context, attrs: Attrs, x: Tensor) -> Tensor:
    return torch.pow(x, attrs["exponent"])


@MEANING.rule("round_to")
def _round_to(ctx: Context, attrs: Attrs, x: Tensor) -> Tensor:
    return stored(x, ctx.dtype(attrs["dtype"])).to(ctx.compute)


@MEANING.rule("broadcast")
def _broadcast(ctx: Context, attrs: Attrs, x: Tensor) -> Tensor:
    m = ctx.rows(attrs.get("rows", "M")) if "m" in attrs["axes"] else x.shape[0]
    n = ctx.cols(attrs["width"]) if "n" in attrs["axes"] else x.shape[1]
    return x.expand(m, n)


# ------------------------------------------------------------------------- pairs and heads
def split_pairs(x: Tensor, pairs: str) -> tuple[Tensor, Tensor]:
    """Both members of the pairs of the columns of x: (M, C) -> two of (M, C / 2)."""
    layout, head = parse_pairs(pairs)
    m, c = x.shape
    if layout == "adjacent":
        view = x.reshape(m, c // 2, 2)
        return view[:, :, 0], view[:, :, 1]
    head = head or max(c, 1)
    view = x.reshape(m, c // head, 2, head // 2)
    return view[:, :, 0].reshape(m, c // 2), view[:, :, 1].reshape(m, c // 2)


def join_pairs(first: Tensor, second: Tensor, pairs: str) -> Tensor:
    """Inverse of :func:`split_pairs`."""
    first, second = torch.broadcast_tensors(first, second)
    layout, head = parse_pairs(pairs)
    m, c = first.shape
    if layout == "adjacent":
        return torch.stack((first, second), dim=2).reshape(m, 2 * c)
    head = head or max(2 * c, 1)
    halves = (x.reshape(m, 2 * c // head, head // 2) for x in (first, second))
    return torch.stack(tuple(halves), dim=2).reshape(m, 2 * c)


@MEANING.rule("unpack")
def _unpack(ctx: Context, attrs: Attrs, x: Tensor) -> Tensor:
    return split_pairs(x, attrs["pairs"])[attrs["member"]]


@MEANING.rule("pack")
def _pack(ctx: Context, attrs: Attrs, first: Tensor, second: Tensor) -> Tensor:
    return join_pairs(first, second, attrs["pairs"])


@MEANING.rule("rotate")
def _rotate(ctx: Context, attrs: Attrs, x: Tensor, cos_sin: Tensor) -> Tensor:
    head_dim, rotary_dim = attrs["head_dim"], attrs["rotary_dim"]
    m, c = x.shape
    heads = c // head_dim if attrs["heads"] < 0 else attrs["heads"]
    x = x.reshape(m, c // head_dim, head_dim)
    turned, tail, others = x[:, :heads, :rotary_dim], x[:, :heads, rotary_dim:], x[:, heads:]
    cos, sin = (t[:, None, :] for t in cos_sin.split(rotary_dim // 2, dim=1))
    if attrs["inverse"]:
        sin = -sin
    flat = turned.reshape(-1, rotary_dim)
    a, b = (t.reshape(m, heads, rotary_dim // 2) for t in split_pairs(flat, attrs["pairs"]))
    first, second = a * cos - b * sin, a * sin + b * cos
    shape = (-1, rotary_dim // 2)
    flat = join_pairs(first.reshape(shape), second.reshape(shape), attrs["pairs"])
    turned = flat.reshape(m, heads, rotary_dim)
    return torch.cat((torch.cat((turned, tail), dim=2), others), dim=1).reshape(m, c)


@MEANING.rule("group_sum")
def _group_sum(ctx: Context, attrs: Attrs, x: Tensor) -> Tensor:
    m, c = x.shape
    return x.reshape(m, c // attrs["size"], attrs["size"]).sum(2)


@MEANING.rule("ungroup")
def _ungroup(ctx: Context, attrs: Attrs, x: Tensor) -> Tensor:
    return x.repeat_interleave(attrs["size"], dim=1)


@MEANING.rule("onehot")
def _onehot(ctx: Context, attrs: Attrs, index: Tensor) -> Tensor:
    columns = torch.arange(ctx.cols(attrs["width"]), device=index.device)
    return (index == columns).to(ctx.compute)


# ----------------------------------------------------------------------------- reductions
@dataclass(frozen=True, slots=True)
class Reduction:
    """How a reduction over columns is split into tiles.

    Attributes:
        components: names of the state's parts, each (M, T) in the compute dtype.
        partial: (tiles (M, T, w), valid (T, w) or None, further arguments) -> components.
        combine: components -> result (M,).
    """

    components: tuple[str, ...]
    partial: Callable[..., tuple[Tensor, ...]]
    combine: Callable[..., Tensor]


def _fill(x: Tensor, valid: Tensor | None, value: float) -> Tensor:
    return x if valid is None else torch.where(valid, x, x.new_full((), value))


def _max_partial(x: Tensor, valid: Tensor | None) -> tuple[Tensor]:
    return (_fill(x, valid, float("-inf")).amax(2),)


def _max_combine(x: Tensor) -> Tensor:
    return x.amax(1) if x.shape[1] else x.new_full((x.shape[0],), float("-inf"))


def _sum_partial(x: Tensor, valid: Tensor | None) -> tuple[Tensor]:
    return (_fill(x, valid, 0.0).sum(2),)


_SUM = Reduction(("sum",), _sum_partial, lambda s: s.sum(1))
REDUCTION.rule("rowsum", "colsum", "totalsum")(_SUM)
REDUCTION.rule("rowmax", "colmax")(Reduction(("max",), _max_partial, _max_combine))


def _chan_partial(x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    m, tiles, width = x.shape
    if valid is None:
        n = x.new_full((m, tiles), width)
    else:
        n = valid.sum(1).to(x.dtype).expand(m, tiles)
    mean = _fill(x, valid, 0.0).sum(2) / n
    deviation = _fill(x - mean[:, :, None], valid, 0.0)
    m2, rest = (deviation * deviation).sum(2), deviation.sum(2)
    # Zero but for the rounding of the mean, which this takes out again. Squares that overflow stay
    # infinite: that of the rest may overflow, too, and inf - inf is NaN.
    rounding = (rest * (rest / n)).masked_fill(m2.isinf(), 0.0)
    return n, mean, (m2 - rounding).clamp_min(0.0)


def _chan_mean(n: Tensor, mean: Tensor, m2: Tensor) -> Tensor:
    # Around the first tile's mean: exact when all tiles agree, however large the mean is.
    origin = _shift(mean[:, :1]).sum(1, keepdim=True)  # of no tiles: 0, and the result is 0 / 0
    return origin[:, 0] + (n * (mean - origin)).sum(1) / n.sum(1)


def _chan_variance(n: Tensor, mean: Tensor, m2: Tensor) -> Tensor:
    between = mean - _chan_mean(n, mean, m2)[:, None]
    return (m2.sum(1) + (n * between * between).sum(1)) / n.sum(1)


_CHAN = ("count", "mean", "m2")
REDUCTION.rule("rowmean")(Reduction(_CHAN, _chan_partial, _chan_mean))
REDUCTION.rule("rowvar")(Reduction(_CHAN, _chan_partial, _chan_variance))


def _shift(maximum: Tensor) -> Tensor:
    """The maximum where it is finite, else 0, so that infinities and NaN keep their meaning."""
    return torch.where(maximum.isfinite(), maximum, maximum.new_zeros(()))


def _lse_partial(
    x: Tensor, valid: Tensor | None, payload: Tensor | None = None
) -> tuple[Tensor, ...]:
    (maximum,) = _max_partial(x, valid)
    weight = _fill(torch.exp(x - _shift(maximum)[:, :, None]), valid, 0.0)
    if payload is None:
        return maximum, weight.sum(2)
    weighted = torch.where(weight == 0, weight, weight * payload)  # 0 times an inf payload is 0
    return maximum, weight.sum(2), _fill(weighted, valid, 0.0).sum(2)


def _rescaled(maximum: Tensor, *sums: Tensor) -> tuple[Tensor, ...]:
    """Shift of the whole row, then each sum over tiles brought to that shift."""
    shift = _shift(_max_combine(maximum))
    scale = torch.exp(_shift(maximum) - shift[:, None])
    return shift, *(torch.where(s == 0, s, s * scale).sum(1) for s in sums)


def _lse_combine(maximum: Tensor, total: Tensor) -> Tensor:
    shift, total = _rescaled(maximum, total)
    return shift + torch.log(total)


def _softmean_combine(maximum: Tensor, total: Tensor, payload: Tensor) -> Tensor:
    _, total, payload = _rescaled(maximum, total, payload)
    return payload / total


REDUCTION.rule("rowlse")(Reduction(("max", "sum"), _lse_partial, _lse_combine))
REDUCTION.rule("rowsoftmean")(Reduction(("max", "sum", "payload"), _lse_partial, _softmean_combine))


def _select_partial(x: Tensor, valid: Tensor | None, index: Tensor) -> tuple[Tensor]:
    m, tiles, width = x.shape
    flat = x.reshape(m, tiles * width)
    if not flat.shape[1]:
        return (flat.new_zeros(m, tiles),)
    inside = (index >= 0) & (index < flat.shape[1])
    if valid is not None:
        inside &= valid.reshape(-1)[index.clamp(0, flat.shape[1] - 1)]
    safe = torch.where(inside, index, index.new_zeros(()))
    value = torch.where(inside, flat.gather(1, safe), flat.new_zeros(()))
    return (flat.new_zeros(m, tiles).scatter(1, safe // width, value),)


REDUCTION.rule("select")(Reduction(("value",), _select_partial, lambda v: v.sum(1)))


@MEANING.rule("combine")
def _combine(ctx: Context, attrs: Attrs, *parts: Tensor) -> Tensor:
    op = attrs["reduction"]
    if op == "totalsum":
        return parts[0].sum().reshape(1, 1)
    if op in COL_REDUCTIONS:
        columns: Tensor = REDUCTION[op].combine(*(p.T for p in parts))
        return columns[None, :]
    rows: Tensor = REDUCTION[op].combine(*parts)
    return rows[:, None]
