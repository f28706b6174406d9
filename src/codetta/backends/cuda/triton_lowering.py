"""LOWERING: the Triton expression of every primitive.

An entry for a map or a stateful transform is a rule ``(emit, node, at) -> Val``: it asks ``emit``
for its arguments at the columns it needs and emits one expression. An entry for a reduction is a
:class:`~codetta.backends.cuda.triton_folds.Fold` (triton_folds.py). A missing entry is
:class:`~codetta.errors.MissingRule`.

All values are two-dimensional blocks: (rows or 1, columns or 1); Triton's broadcasting is the
language's, and ``broadcast`` emits nothing. Nothing here needs Triton: this is text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from codetta.backends.cuda.triton_columns import Columns, Val
from codetta.backends.cuda.triton_loads import load_index, rope
from codetta.language.primitives import Family, Primitive, Table
from codetta.language.values import Node, attrs_of

if TYPE_CHECKING:
    from codetta.backends.cuda.triton_source import Emitter


def _covered(p: Primitive) -> bool:
    return p.family is not Family.LEAF and p.name != "operand"


LOWERING: Table[Any] = Table("LOWERING", "codetta.backends.cuda.triton_lowering", _covered)


Rule = Callable[["Emitter", Node, "Columns | None"], Val]


def _expression(template: str) -> Rule:
    """Rule of an elementwise map; {0}, {1}, ... are its arguments."""

    def rule(emit: Emitter, node: Node, at: Columns | None) -> Val:
        return emit.apply(template, *(emit.value(a, at) for a in node.args))

    return rule


for _name, _template in {
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "erf": "tl.erf({0})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "relu": "tl.where({0} <= 0.0, 0.0, {0})",  # NaN passes
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "maximum": "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",  # NaN wins
    "minimum": "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "where": "tl.where({0}, {1}, {2})",
}.items():
    LOWERING.rule(_name)(_expression(_template))


# Coefficients of Cephes (Moshier): tanh x = x + x z P(z) / Q(z), z = x^2, below 0.625.
_TANH32 = (
    (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1),
    (1.0,),
)
_TANH64 = (
    (-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3),
    (1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3),
)


@LOWERING.rule("tanh")
def _tanh(emit: Emitter, node: Node, at: Columns | None) -> Val:
    """No tanh in tl; 1 - 2 / (e^2x + 1) alone loses all digits of a small x."""
    x = emit.value(node.args[0], at)
    z = emit.apply("{0} * {0}", x)
    p, q = (_polynomial(emit, z, c) for c in (_TANH32 if emit.compute == "fp32" else _TANH64))
    small = emit.apply("{0} + {0} * {1} * {2} / {3}", x, z, p, q)
    big = emit.apply("1.0 - 2.0 / (tl.exp(2.0 * tl.abs({0})) + 1.0)", x)
    big = emit.apply("tl.where({0} < 0.0, -{1}, {1})", x, big)
    return emit.apply("tl.where(tl.abs({0}) < 0.625, {1}, {2})", x, small, big)


def _polynomial(emit: Emitter, z: Val, coefficients: tuple[float, ...]) -> Val:
    total = emit.const(coefficients[0])
    for c in coefficients[1:]:
        total = emit.apply("{0} * {1} + {2}", total, z, emit.const(c))
    return total


@LOWERING.rule("pow")
def _pow(emit: Emitter, node: Node, at: Columns | None) -> Val:
    """Whole and half exponents by multiplication and square root, others through fp64."""
    x, n = emit.value(node.args[0], at), float(node.attr("exponent"))
    whole = math.floor(abs(n)) if math.isfinite(n) else 0
    if abs(n) <= 16 and abs(n) - whole in (0.0, 0.5):
        y = _power(emit, x, whole)
        if abs(n) != whole:
            root = emit.apply("tl.sqrt({0})", x)
            y = emit.apply("{0} * {1}", y, root) if whole else root
        return emit.apply("1.0 / {0}", y) if n < 0 else y
    exponent = emit.apply("{0}.to(tl.float64)", emit.const(n))
    wide = emit.apply("tl.exp2({1} * tl.log2(tl.abs({0}).to(tl.float64)))", x, exponent)
    y = emit.apply(f"{{0}}.to({emit.dtype})", wide)
    if n.is_integer():
        return emit.apply("tl.where({0} < 0.0, -{1}, {1})", x, y) if n % 2 else y
    return emit.apply("tl.where({0} < 0.0, float('nan'), {1})", x, y)


def _power(emit: Emitter, x: Val, n: int) -> Val:
    """x^n by squaring."""
    if n == 0:
        return emit.const(1.0)
    half = _power(emit, x, n // 2) if n > 1 else None
    if half is None:
        return x
    square = emit.apply("{0} * {0}", half)
    return emit.apply("{0} * {1}", square, x) if n % 2 else square


@LOWERING.rule("round_to")
def _round_to(emit: Emitter, node: Node, at: Columns | None) -> Val:
    x, dtype = emit.value(node.args[0], at), emit.storage(node.attr("dtype"))
    if dtype in (emit.compute, "fp64"):
        return x
    return emit.apply(
        emit.convert(emit.convert("{0}", emit.compute, dtype), dtype, emit.compute), x
    )


@LOWERING.rule("broadcast")
def _broadcast(emit: Emitter, node: Node, at: Columns | None) -> Val:
    return emit.value(node.args[0], at)  # the consumer broadcasts


# ------------------------------------------------------------------------- pairs and heads
@LOWERING.rule("unpack")
def _unpack(emit: Emitter, node: Node, at: Columns | None) -> Val:
    assert at is not None
    pairs, k = node.attr("pairs"), node.attr("member")
    both = emit.columns.doubled(at) if pairs == "adjacent" else None
    if both is None:
        return emit.value(node.args[0], emit.columns.member(at, pairs, k))
    return emit.split(emit.value(node.args[0], both))[k]


@LOWERING.rule("pack")
def _pack(emit: Emitter, node: Node, at: Columns | None) -> Val:
    assert at is not None
    pairs = node.attr("pairs")
    if at.member is not None and at.member[1] == pairs:
        q, _, k = at.member
        return emit.value(node.args[k], q)
    half = emit.columns.halved(at) if pairs == "adjacent" else None
    if half is not None:
        a, b = (emit.value(i, half) for i in node.args)
        return emit.join(a, b, half.block)
    pair, second = emit.columns.pair_of(at, pairs)
    a, b = (emit.value(i, pair) for i in node.args)
    return emit.apply("tl.where({0}, {2}, {1})", Val(second, False, at.block), a, b)


@LOWERING.rule("rotate")
def _rotate(emit: Emitter, node: Node, at: Columns | None) -> Val:
    """a cos - b sin for first members, b cos + a sin for second ones."""
    assert at is not None
    x, table = node.args
    d, r, pairs = node.attr("head_dim"), node.attr("rotary_dim"), node.attr("pairs")
    half = emit.columns.halved(at) if pairs == "adjacent" and d % 2 == 0 else None
    if half is not None:
        a, b = emit.split(emit.value(x, at))
        head, j = emit.columns.divided(half, d // 2)
        turned = _turned(emit, node, head, f"{j} < {r // 2}", half)
        cos, sin = rope(emit, table, node, j, turned, half)
        first = emit.apply("tl.where({4}, {0} * {2} - {1} * {3}, {0})", a, b, cos, sin, turned)
        second = emit.apply("tl.where({4}, {0} * {3} + {1} * {2}, {1})", a, b, cos, sin, turned)
        return emit.join(first, second, half.block)
    if pairs == "halves" and r == d and at.member is not None and at.member[1] == f"halves:{d}":
        q, layout, k = at.member
        head, j = emit.columns.divided(q, d // 2)
        turned = _turned(emit, node, head, "", q)
        mine = emit.value(x, at)
        other = emit.value(x, emit.columns.member(q, layout, 1 - k))
        cos, sin = rope(emit, table, node, j, turned, q)
        sign = "+" if k else "-"
        template = f"tl.where({{4}}, {{0}} * {{2}} {sign} {{1}} * {{3}}, {{0}})"
        return emit.apply(template, mine, other, cos, sin, turned)
    return _rotate_anywhere(emit, node, at)


def _rotate_anywhere(emit: Emitter, node: Node, at: Columns) -> Val:
    x, table = node.args
    d, r, pairs = node.attr("head_dim"), node.attr("rotary_dim"), node.attr("pairs")
    head, s = emit.columns.divided(at, d)
    turned = _turned(emit, node, head, f"{s} < {r}", at)
    if pairs == "adjacent":
        second = emit.line("second", f"{s} % 2 == 1")
        j, step = emit.line("j", f"{s} // 2"), 1
    else:
        step = r // 2
        second = emit.line("second", f"{s} >= {step}")
        j = emit.line("j", f"{s} - tl.where({second}, {step}, 0)")
    move = f"tl.where({turned.name}, tl.where({second}, {-step}, {step}), 0)"
    partner = emit.columns.partner(at, f"{at.index} + {move}", (d, r, pairs, node.attr("heads")), d)
    mine, other = emit.value(x, at), emit.value(x, partner)
    cos, sin = rope(emit, table, node, j, turned, at)
    return emit.apply(
        "tl.where({5}, {0} * {2} + tl.where({4}, {1}, -{1}) * {3}, {0})", mine, other, cos, sin,
        Val(second, False, at.block), turned,
    )  # fmt: skip


def _turned(emit: Emitter, node: Node, head: str, inside: str, at: Columns) -> Val:
    """Condition that a column is rotated at all; others pass bit for bit."""
    heads = node.attr("heads")
    conditions = [
        f"({c})" for c in (inside, f"{head} < {heads}" if heads >= 0 else "", at.valid) if c
    ]
    text = " & ".join(conditions)
    return Val(emit.once(("turned", text), "turned", text, emit.col_section), False, at.block)


@LOWERING.rule("group_sum")
def _group_sum(emit: Emitter, node: Node, at: Columns | None) -> Val:
    assert at is not None
    size = node.attr("size")
    if emit.layout == f"halves:{size}" and at.run is not None:
        half, padded = emit.columns.spread(at, size // 2)
        pair = (emit.value(node.args[0], emit.columns.member(half, emit.layout, k)) for k in (0, 1))
        # Added before the sum over columns, whose exchanges between threads are then half as many.
        both = emit.apply("{0} + {1}", *pair)
        return _summed(emit, both, half, at.block, padded, size // 2)
    wide, padded = emit.columns.spread(at, size)
    return _summed(emit, emit.value(node.args[0], wide), wide, at.block, padded, size)


def _summed(emit: Emitter, x: Val, wide: Columns, block: int, padded: int, size: int) -> Val:
    if not x.cols:
        return emit.apply("{0} * {1}", x, emit.const(float(size)))
    if padded != size:
        x = emit.apply("tl.where({1}, {0}, 0.0)", x, Val(wide.valid, False, wide.block))
    rows = emit.height(x.rows)
    return emit.apply(
        f"tl.sum(tl.reshape({{0}}, [{rows}, {block}, {padded}]), axis=2)", x, cols=block
    )


@LOWERING.rule("ungroup")
def _ungroup(emit: Emitter, node: Node, at: Columns | None) -> Val:
    assert at is not None
    groups, each = emit.columns.groups(at, node.attr("size"))
    x = emit.value(node.args[0], groups)
    if not each or not x.cols:
        return x
    shape = f"[{emit.height(x.rows)}, {groups.block}, {each}]"
    flat = f"[{emit.height(x.rows)}, {groups.block * each}]"
    template = f"tl.reshape(tl.broadcast_to(tl.expand_dims({{0}}, 2), {shape}), {flat})"
    return emit.apply(template, x, cols=groups.block * each)


@LOWERING.rule("onehot")
def _onehot(emit: Emitter, node: Node, at: Columns | None) -> Val:
    assert at is not None
    index = load_index(emit, node.args[0])
    return emit.apply(
        f"tl.where({{0}} == {{1}}, 1.0, 0.0).to({emit.dtype})",
        index,
        Val(at.index, False, at.block),
    )


@LOWERING.rule("combine")
def _combine(emit: Emitter, node: Node, at: Columns | None) -> Val:
    return emit.combine(node, attrs_of(node)["reduction"], at)
