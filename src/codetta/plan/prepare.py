"""Weight preparation: folding and packing parameters as a one-output Plan says.

``codetta::prepare`` is a library operator like those of :mod:`codetta.ops.library`: its arguments
are the Plan's canonical text and the weights. The backend of the weights' device runs it;
:func:`prepared` is the definition, operation by operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from codetta.backends.select import backend_for
from codetta.language.meaning import NAMED_DTYPES
from codetta.language.types import Kind
from codetta.ops.inductor import register_fake
from codetta.plan.evaluate import evaluate
from codetta.plan.plan import Plan


def prepared(plan: Plan, weights: Sequence[Tensor]) -> Tensor:
    """The one output of ``plan`` in two dimensions, in fp32 or wider, rounded once.

    Matrices are stored in the dtype the Plan rounds them to, else in that of the first matrix
    given, vectors in that of the arithmetic.
    """
    named = {i.name: w for i, w in zip(plan.inputs, weights, strict=True)}
    stored, compute = prepared_dtypes(plan, weights)
    (result,) = evaluate(plan, compute=compute, **named).values()
    kind = plan.nodes[plan.outputs[0].node].type.kind
    if kind is not Kind.TILE:
        result = result.reshape(-1, 1) if kind is Kind.COL else result.reshape(1, -1)
    result = result.to(stored).contiguous()
    # An operator must not return an alias of its arguments, and a Plan may ask for a view of one.
    taken = {w.untyped_storage()._cdata for w in weights}
    return result.clone() if result.untyped_storage()._cdata in taken else result


def prepared_dtypes(plan: Plan, weights: Sequence[Tensor]) -> tuple[torch.dtype, torch.dtype]:
    """(stored, compute)."""
    compute = torch.float32
    for w in weights:
        compute = torch.promote_types(compute, w.dtype)
    out = plan.outputs[0].node
    if plan.nodes[out].type.kind is not Kind.TILE:
        return compute, compute
    if (named := plan.storage(out)) in NAMED_DTYPES:
        return NAMED_DTYPES[named], compute
    matrices = (
        w.dtype for w, i in zip(weights, plan.inputs, strict=True) if i.type.kind is Kind.TILE
    )
    return next(matrices, compute), compute


# --------------------------------------------------------------------------------- operator
_LIBRARY = torch.library.Library("codetta", "FRAGMENT")
_LIBRARY.define(
    "prepare(str plan, Tensor[] weights) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Plan:
    return Plan.parse(text)


def _prepare(plan: str, weights: Sequence[Tensor]) -> Tensor:
    return backend_for(weights[0]).prepare(_parsed(plan), weights)


_LIBRARY.impl("prepare", _prepare, "CompositeExplicitAutograd")


@register_fake("prepare", _LIBRARY)
def _prepare_fake(plan: str, weights: Sequence[Tensor]) -> Tensor:
    part = _parsed(plan)
    out = part.nodes[part.outputs[0].node].type
    rows = int(out.rows) if out.has_rows else 1
    stored, _ = prepared_dtypes(part, weights)
    return weights[0].new_empty(rows, int(out.cols) if out.has_cols else 1, dtype=stored)


PREPARE: Any = torch.ops.codetta.prepare.default
