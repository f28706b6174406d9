"""Programs to test with, at least one per primitive, and inputs for any program."""

from __future__ import annotations

import operator

import torch

from codetta.language import Col, Index, Program, Rotary, Row, Scalar, Tile, epilogue
from codetta.language import functions as f
from codetta.language.functions import (
    colmax,
    colsum,
    columns,
    group_mean,
    group_sum,
    logsumexp,
    maximum,
    minimum,
    moments,
    pack,
    rotate,
    round_to,
    rowmax,
    rowmean,
    rows,
    rowsum,
    select,
    silu,
    softcap,
    store,
    totalsum,
    ungroup,
    unpack,
    where,
)
from codetta.language.types import Kind

#: Name of the test program -> Program. Every primitive occurs in one of them or in its derivative.
CASES: dict[str, Program] = {}
HEAD = 4


def case(function, name=None):
    """Register the epilogue ``function`` under its name."""
    function.__name__ = name or function.__name__
    CASES[function.__name__] = program = epilogue(function)
    return program


# ---------------------------------------------------------------------------------- maps
@case
def identity(acc):
    return acc


def elementwise(function):
    return lambda acc: function(acc)


for _name in ("exp", "sin", "cos", "tanh", "erf", "sigmoid", "relu", "abs", "silu", "gelu"):
    case(elementwise(getattr(f, _name)), _name)
for _name, _map in {"log": f.log, "sqrt": f.sqrt, "rsqrt": f.rsqrt}.items():
    case(elementwise(lambda x, g=_map: g(x * x + 0.5)), _name)  # of positive numbers only
case(elementwise(lambda x: -x * 2.0), "neg")
case(elementwise(lambda x: (x * x + 0.5) ** 1.5), "pow")
case(elementwise(lambda x: f.gelu(x, "tanh")), "gelu_tanh")
case(elementwise(lambda x: softcap(x, 3.0)), "softcap")


def chosen_by(compare):
    def chosen(acc, c: Tile):
        return where(compare(acc, c), acc * c, 2.0 * acc - c)

    return chosen


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    case(chosen_by(getattr(operator, _name)), f"where_{_name}")


@case
def residual(acc, residual: Tile):
    return acc + residual


@case
def arithmetic(acc, r: Col, w: Row, s: Scalar, t: Tile):
    return {"x": acc * r / (1.5 + w * w) - t, "y": round_to(acc * s + t) * w}


@case
def extremes(acc, t: Tile, w: Row):
    return maximum(acc, t) * minimum(acc, w)


@case
def wide_store(acc, t: Tile):
    return {"x": store(acc * t, "accumulator"), "y": acc}


@case
def two_names_of_one_value(acc, t: Tile):
    return {"x": acc, "y": acc, "t": t}


# ---------------------------------------------------------------------------- pairs and heads
def gated_by(pairs):
    def gated(acc, r: Col):
        g, u = unpack(acc * r, pairs)
        return {"z": pack(g, u, pairs), "y": silu(g) * u}

    return gated


for _pairs in ("adjacent", "halves", f"halves:{HEAD}"):
    case(gated_by(_pairs), f"gated_{_pairs.replace(':', '_')}")


@case
def expanded(acc, z: Tile(width=2), w: Row(width=0.5), y: Tile(width=0.5)):
    g, u = unpack(z)
    a, b = unpack(acc)
    return {"d": pack(acc * u, acc * g), "h": a * b * w + y, "s": rowsum(acc * u + g)}


@case
def swapped_halves(acc):
    a, b = unpack(acc, "halves")
    lse, mean = logsumexp(acc, acc * acc)
    return {"x": pack(b, a, "halves"), "s": rowsum(a * b), "lse": lse, "mean": mean}


@case
def rotated(acc, rope: Rotary, r: Col):
    return rotate(acc * r, rope, head_dim=HEAD)


@case
def rotated_partly(acc, rope: Rotary, w: Row):
    x = rotate(acc * w, rope, head_dim=HEAD, rotary_dim=2, heads=1, pairs="adjacent")
    return {"x": x, "s": rowsum(x * x)}


@case
def head_norm(acc, w: Row):
    r = f.rsqrt(group_mean(acc * acc, HEAD) + 0.1)
    return {"x": acc * ungroup(r, HEAD) * w, "g": group_sum(acc, HEAD)}


# --------------------------------------------------------------------------------- reductions
@case
def rms(acc, residual: Tile):
    x = round_to(acc + residual)
    return {"x": x, "r": f.rsqrt(rowsum(x * x) / columns(x) + 1e-3)}


@case
def row_statistics(acc, s: Scalar):
    mean, variance = moments(acc * s)
    return {"mean": mean, "rstd": f.rsqrt(variance + 1e-3), "m": rowmean(acc)}


@case
def row_maximum(acc, w: Row):
    return {"m": rowmax(acc * w), "x": acc}


@case
def cross_entropy(acc, r: Col, target: Index):
    z = acc * r
    lse, mean = logsumexp(z, z)
    return {"loss": lse - select(z, target), "mean": mean, "lse": lse}


@case
def column_sums(acc, r: Col):
    return {"s": colsum(acc * r) / rows(acc), "m": colmax(acc), "x": acc}


@case
def total(acc, t: Tile):
    return {"loss": totalsum(acc * t), "x": acc}


@case
def bare_reduction(acc, r: Col):
    return rowsum(acc * r)


# ------------------------------------------------------------------------------------ inputs
def inputs(program, lead, units, k, dtype=torch.float64, seed=0):
    """Random a (*lead, k), b (k, N) with N = units * granule, and operands by name.

    They are the same on every device, and lie on the default device.
    """
    g = torch.Generator("cpu").manual_seed(seed)
    n = units * program.granule

    def random(*shape, dtype=dtype):
        x = torch.randn(shape, generator=g, dtype=torch.float64, device="cpu")
        return x.to(device=torch.get_default_device(), dtype=dtype)

    def integers(high):
        x = torch.randint(0, high, lead, generator=g, device="cpu")
        return x.to(torch.get_default_device())

    operands = {}
    for o in program.operands:
        cols = int(n * o.width)
        if o.kind is Kind.TILE:
            operands[o.name] = random(*lead, cols)
        elif o.kind is Kind.ROW:
            operands[o.name] = random(cols)
        elif o.kind is Kind.COL:
            operands[o.name] = random(*lead) + 1.5  # away from 0
        elif o.kind is Kind.SCALAR:
            operands[o.name] = random(1)
        elif o.kind is Kind.INDEX:
            operands[o.name] = integers(max(n, 1))
        else:
            node = next(x for x in program.nodes if x.op == "rotate")
            angles = random(11, node.attr("rotary_dim") // 2)
            table = torch.cat((angles.cos(), angles.sin()), dim=1)
            operands[o.name] = (table, integers(11))
    return random(*lead, k), random(k, n) / max(k, 1) ** 0.5, operands


def differentiable(program):
    """Names of the operands that have a gradient."""
    return [o.name for o in program.operands if o.kind not in (Kind.INDEX, Kind.ROTARY)]
