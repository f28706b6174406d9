"""Outputs that stand side by side: q, k and v as columns of one matrix.

Projections of one activation are one GEMM (R6) if their results are concatenated. In a graph they
go their own ways to the attention, so they are concatenated here, with what happens to each on the
way, and taken apart again by slices, which are views. What happens may differ only in its row
vectors, or be nothing at all:

    rotate(norm(x Wqᵀ)), rotate(norm(x Wkᵀ)), x Wvᵀ
        -> columns of  rotate(where(is_qk, norm(z), z), heads of q and k),  z = x [Wq; Wk; Wv]ᵀ
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from codetta.language.functions import where
from codetta.language.types import Kind
from codetta.language.values import Value, attrs_of
from codetta.plan.plan import PlanBuilder

IS_ROTATED = "is_qk"


@dataclass
class Chain:
    """One output as a function of a projection.

    Attributes:
        value: the output.
        source: x Wᵀ (+ b), from which it is computed.
        shape: what happens on the way, without the names of row vectors and sizes.
        rows: those row vectors, in order.
        rope: number of the rotary tables, or -1.
        head_dim, rotary_dim: of the rotation.
    """

    value: Value
    source: Value
    shape: tuple[Any, ...]
    rows: list[Value] = field(default_factory=list)
    rope: int = -1
    head_dim: int = 0
    rotary_dim: int = 0
    scores_only: bool = False


@dataclass(frozen=True)
class Joined:
    """Outputs as columns start to stop of one matrix."""

    value: Value
    columns: dict[int, tuple[int, int]]  # number of the output's value -> its columns
    scores_only: bool
    mask: tuple[int, int] | None = None  # columns where is_qk is 1, and all columns


def join(b: PlanBuilder, outputs: list[Value], scores_only: set[int]) -> list[Joined]:
    """Groups of outputs that become one matrix each."""
    chains: dict[tuple[str, int], list[Chain]] = {}
    for out in outputs:
        chain = _chain(b, out)
        if chain is not None:
            chain.scores_only = out.id in scores_only
            key = _family(chain.source)
            if key is not None:
                chains.setdefault(key, []).append(chain)
    joined = []
    for group in chains.values():
        found = _joined(b, group)
        if found is not None:
            joined.append(found)
    return joined


def _family(source: Value) -> tuple[str, int] | None:
    """What chains must share: the activation that is projected, or the packed projection."""
    if source.node.op == "slice_cols":
        return "packed", source.node.args[0]
    x = _projection(source)
    return None if x is None else ("x", x.node.args[0])


def _projection(x: Value) -> Value | None:
    """The contraction in x Wᵀ or x Wᵀ + b."""
    node = x.node
    if node.op == "add":
        left, right = (Value(x.tracer, a) for a in node.args)
        return _projection(left) if right.type.kind is Kind.ROW and left.node.op == "mm" else None
    return x if node.op == "mm" and node.attr("layout") == "nt" else None


def _chain(b: PlanBuilder, out: Value) -> Chain | None:
    """The output as a chain from a projection, or None."""
    rope, head_dim, rotary_dim, inner = -1, 0, 0, out
    if out.node.op == "rotate" and not out.node.attr("inverse"):
        attrs = attrs_of(out.node)
        if attrs["pairs"] != "halves" or attrs["heads"] * attrs["head_dim"] != out.type.cols:
            return None
        rope, head_dim, rotary_dim = out.node.args[1], attrs["head_dim"], attrs["rotary_dim"]
        inner = Value(b, out.node.args[0])
    rows: list[Value] = []
    sources: list[Value] = []
    shape = _shape(inner, rows, sources, {})
    if shape is None or len({s.id for s in sources}) != 1:
        return None
    return Chain(out, sources[0], shape, rows, rope, head_dim, rotary_dim)


def _packed(x: Value) -> bool:
    """Columns of a projection."""
    return x.node.op == "slice_cols" and _projection(Value(x.tracer, x.node.args[0])) is not None


def _shape(
    x: Value, rows: list[Value], sources: list[Value], seen: dict[int, Any]
) -> tuple[Any, ...] | None:
    if x.id in seen:
        return ("again", seen[x.id])
    if _projection(x) is not None or _packed(x):
        sources.append(x)
        return ("source",)
    if x.type.kind is Kind.ROW and x.node.op != "const":
        rows.append(x)
        seen[x.id] = len(seen)
        return ("row",)
    if x.node.op == "const":
        return ("const", x.node.attr("value"))
    if x.node.op in ("mm", "operand", "opaque", "cat_cols", "slice_cols", "rotate", "extent"):
        return None
    if not x.node.args or x.type.kind not in (Kind.TILE,):
        return None
    parts = []
    for a in x.node.args:
        part = _shape(Value(x.tracer, a), rows, sources, seen)
        if part is None:
            return None
        parts.append(part)
    seen[x.id] = len(seen)
    attrs = tuple((k, v) for k, v in x.node.attrs if k not in ("width", "rows", "path"))
    return (x.node.op, attrs, *parts)


def _joined(b: PlanBuilder, group: list[Chain]) -> Joined | None:
    turned = [c for c in group if c.rope >= 0]
    plain = [c for c in group if c.rope < 0]
    if len(group) < 2 or not all(c.shape == ("source",) for c in plain):
        return None
    if (
        len({c.shape for c in turned}) > 1
        or len({(c.rope, c.head_dim, c.rotary_dim) for c in turned}) > 1
    ):
        return None
    order = [*turned, *plain]
    if all(c.source.node.op == "slice_cols" for c in order):
        order.sort(key=lambda c: int(c.source.node.attr("start")))
        if [c.rope >= 0 for c in order] != sorted((c.rope >= 0 for c in order), reverse=True):
            return None
        turned = [c for c in order if c.rope >= 0]
    if turned and any(c.source.type.cols % turned[0].head_dim for c in plain):
        return None
    if len({c.source.id for c in order}) < len(order):
        return None
    together = _together(b, order)
    if together is None:
        return None
    z = together
    columns, start = {}, 0
    for c in order:
        columns[c.value.id] = (start, start + int(c.source.type.cols))
        start = columns[c.value.id][1]
    mask = None
    value = z
    if turned and turned[0].shape != ("source",):
        covered = sum(int(c.source.type.cols) for c in turned)
        value = _replayed(b, turned, plain, z)
        if plain:
            mask = (covered, int(z.type.cols))
            flag = b.row(IS_ROTATED, int(z.type.cols))
            value = where(flag > 0.5, value, z)
    if turned:
        heads = sum(int(c.source.type.cols) for c in turned) // turned[0].head_dim
        value = b.emit(
            "rotate", value, Value(b, turned[0].rope), head_dim=turned[0].head_dim,
            rotary_dim=turned[0].rotary_dim, heads=heads, pairs="halves", inverse=False,
        )  # fmt: skip
    return Joined(value, columns, all(c.scores_only for c in turned) and bool(turned), mask)


def _together(b: PlanBuilder, order: list[Chain]) -> Value | None:
    """The sources side by side: concatenated, or the packed projection they are columns of."""
    if order[0].source.node.op != "slice_cols":
        return b.emit("cat_cols", *(c.source for c in order))
    at = 0
    for c in order:
        if c.source.node.attr("start") != at:
            return None
        at = c.source.node.attr("stop")
    whole = Value(b, order[0].source.node.args[0])
    return whole if at == whole.type.cols else None


def _replayed(b: PlanBuilder, turned: list[Chain], plain: list[Chain], z: Value) -> Value:
    """What happens to each rotated output, on all columns of z."""
    first = turned[0]
    rows = iter(range(len(first.rows)))
    done: dict[int, Value] = {}

    def row(k: int) -> Value:
        columns = [b.emit("to_col", c.rows[k]) for c in turned]
        for c in plain:  # not used there: any row of the right length
            columns += _filling(b, turned[-1].rows[k], int(c.source.type.cols))
        return b.emit("to_row", b.emit("stack_vectors", *_flat(b, columns)))

    def replay(x: Value) -> Value:
        if x.id in done:
            return done[x.id]
        if x.id == first.source.id:
            found = z
        elif x.type.kind is Kind.ROW and x.node.op != "const":
            found = row(next(rows))
        elif x.node.op == "const":
            found = x
        else:
            attrs = dict(attrs_of(x.node))
            found = b.emit(x.node.op, *(replay(Value(b, a)) for a in x.node.args), **attrs)
        done[x.id] = found
        return found

    inner = Value(b, first.value.node.args[0])
    return replay(inner)


def _filling(b: PlanBuilder, row: Value, columns: int) -> list[Value]:
    """Column vectors of ``columns`` numbers in all, out of the heads of a row."""
    column = b.emit("to_col", row)
    parts = _flat(b, [column])
    size = int(parts[0].type.rows)
    return [parts[0]] * (columns // size)


def _flat(b: PlanBuilder, columns: list[Value]) -> list[Value]:
    """The parts of stacked vectors."""
    found: list[Value] = []
    for c in columns:
        if c.node.op == "stack_vectors":
            found += _flat(b, [Value(b, a) for a in c.node.args])
        elif c.node.op == "to_col" and Value(b, c.node.args[0]).node.op == "to_row":
            found += _flat(b, [Value(b, Value(b, c.node.args[0]).node.args[0])])
        else:
            found.append(c)
    return found
