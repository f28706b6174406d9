"""The epilogue language: what an author imports.

    from codetta.language import Tile, Row, Col, Scalar, rowsum, round_to, unpack, silu

Operand kinds: Tile, Row, Col, Scalar, Index, Rotary. The functions are listed in
:mod:`codetta.language.functions`, the primitives beneath them in
:mod:`codetta.language.primitives`.
"""

from __future__ import annotations

from codetta.language import costs, derivatives, meaning, shapes  # noqa: F401  (fill the tables)
from codetta.language.functions import (
    Store,
    abs,
    colmax,
    colsum,
    columns,
    cos,
    erf,
    exp,
    gelu,
    group_mean,
    group_sum,
    log,
    logsumexp,
    maximum,
    minimum,
    moments,
    onehot,
    pack,
    pow,
    relu,
    rotate,
    round_to,
    rowmax,
    rowmean,
    rows,
    rowsum,
    rsqrt,
    select,
    sigmoid,
    silu,
    sin,
    softcap,
    sqrt,
    square,
    store,
    tanh,
    totalsum,
    ungroup,
    unpack,
    where,
)
from codetta.language.program import Operand, Output, Program
from codetta.language.trace import Col, Index, Rotary, Row, Scalar, Tile, epilogue, finalizer

__all__ = [
    "Col", "Index", "Operand", "Output", "Program", "Rotary", "Row", "Scalar", "Store", "Tile",
    "abs", "colmax", "colsum", "columns", "cos", "epilogue", "erf", "exp", "finalizer", "gelu",
    "group_mean", "group_sum", "log", "logsumexp", "maximum", "minimum", "moments", "onehot",
    "pack", "pow", "relu", "rotate", "round_to", "rowmax", "rowmean", "rows", "rowsum", "rsqrt",
    "select", "sigmoid", "silu", "sin", "softcap", "sqrt", "square", "store", "tanh",
    "totalsum", "ungroup", "unpack", "where",
]  # fmt: skip
