"""LOWERING of the reductions: how their state is folded block by block, in a fixed order.

A fold has the components of REDUCTION (language/meaning.py) as its state and four pieces of text:
the state of one block of elements (``block``), the state of one block of stored partials
(``stored``), the union of two states (``merge``) and the result (``result``). The raw partial of a
tile is the state after the tile's blocks; a final is the result of the state after all blocks, or
after all stored partials in a finalizer. The order of the folds is fixed, so results are
bit-identical from run to run.

Nothing outside the matrix reaches a state: elements are replaced by the identity where ``ok`` is
false. A maximum is NaN if any element is; Triton's own maximum drops NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from codetta.backends.cuda.triton_lowering import LOWERING
from codetta.backends.cuda.triton_task import COMBINED_AT_ONCE

if TYPE_CHECKING:
    from codetta.backends.cuda.triton_source import Emitter

Names = tuple[str, ...]
NAN, INF = "float('nan')", "float('inf')"


@dataclass(frozen=True, slots=True)
class Elements:
    """A block to reduce: variables of x and the further argument, the mask and the axes.

    Attributes:
        x: the elements.
        extra: payload (rowsoftmean), or column numbers to compare the index with (select).
        index: the index of each row (select).
        ok: mask of what lies in the matrix.
        axes: axes to reduce, 1 before 0.
    """

    x: str
    ok: str
    axes: tuple[int, ...]
    extra: str = ""
    index: str = ""


@dataclass(frozen=True, slots=True)
class Fold:
    """Rules of one reduction.

    Attributes:
        start: identity of each component.
        block: (emit, elements) -> components of one block.
        stored: (emit, components of several partials, mask, axes) -> components of all of them.
        merge: (emit, state, components) -> new state, in the same number of components.
        result: (emit, state) -> expression.
    """

    start: Names
    block: Callable[[Emitter, Elements], Names]
    stored: Callable[[Emitter, Names, str, tuple[int, ...]], Names]
    merge: Callable[[Emitter, Names, Names], Names]
    result: Callable[[Emitter, Names], str]


def summed(emit: Emitter, x: str, ok: str, axes: tuple[int, ...]) -> str:
    """Sum of x over the axes, where ok."""
    text = f"tl.where({ok}, {x}, 0.0)"
    for axis in axes:
        text = f"tl.sum({text}, axis={axis}, keep_dims=True)"
    return emit.line("sum", text)


def largest(emit: Emitter, x: str, ok: str, axes: tuple[int, ...]) -> str:
    """Maximum of x over the axes, where ok; NaN wins."""
    masked = emit.line("x", f"tl.where({ok}, {x}, -{INF})")
    top, bad = masked, f"({masked} != {masked}).to(tl.int32)"
    for axis in axes:
        top, bad = (f"tl.max({t}, axis={axis}, keep_dims=True)" for t in (top, bad))
    return emit.line("top", f"tl.where({bad} > 0, {NAN}, {top})")


def larger(emit: Emitter, a: str, b: str) -> str:
    return emit.line("top", f"tl.where(({a} > {b}) | ({a} != {a}), {a}, {b})")


# ------------------------------------------------------------------------------------- sums
def _sum_merge(emit: Emitter, state: Names, new: Names) -> Names:
    return (emit.line("sum", f"{state[0]} + {new[0]}"),)


_SUM = Fold(
    ("0.0",),
    lambda emit, e: (summed(emit, e.x, e.ok, e.axes),),
    lambda emit, parts, ok, axes: (summed(emit, parts[0], ok, axes),),
    _sum_merge,
    lambda emit, state: state[0],
)
LOWERING.rule("rowsum", "colsum", "totalsum")(_SUM)


def _select_block(emit: Emitter, e: Elements) -> Names:
    return (summed(emit, e.x, f"({e.ok}) & ({e.index} == {e.extra})", e.axes),)


LOWERING.rule("select")(Fold(_SUM.start, _select_block, _SUM.stored, _SUM.merge, _SUM.result))
LOWERING.rule("rowmax", "colmax")(
    Fold(
        (f"-{INF}",),
        lambda emit, e: (largest(emit, e.x, e.ok, e.axes),),
        lambda emit, parts, ok, axes: (largest(emit, parts[0], ok, axes),),
        lambda emit, state, new: (larger(emit, state[0], new[0]),),
        lambda emit, state: state[0],
    )
)


# ------------------------------------------------------------ mean and variance, after Chan
def _positive(emit: Emitter, n: str) -> str:
    return emit.line("n", f"tl.where({n} > 0.0, {n}, 1.0)")


def _chan_block(emit: Emitter, e: Elements) -> Names:
    ones = emit.line("ones", f"tl.full([1, 1], 1.0, {emit.dtype})")
    n = summed(emit, ones, e.ok, e.axes)
    divisor = _positive(emit, n)
    mean = emit.line("mean", f"{summed(emit, e.x, e.ok, e.axes)} / {divisor}")
    off = emit.line("off", f"{e.x} - {mean}")
    return n, mean, summed(emit, f"{off} * {off}", e.ok, e.axes)


def _chan_stored(emit: Emitter, parts: Names, ok: str, axes: tuple[int, ...]) -> Names:
    n, mean, m2 = parts
    total = summed(emit, n, ok, axes)
    # Around one tile's mean: exact when all tiles agree, however large the mean is.
    first = f"(tl.arange(0, {COMBINED_AT_ONCE})[None, :] == 0) & ({ok})"
    raw = summed(emit, mean, first, axes)
    origin = emit.line("origin", f"tl.where(tl.abs({raw}) < float('inf'), {raw}, 0.0)")
    shift = summed(emit, f"{n} * ({mean} - {origin})", ok, axes)
    middle = emit.line("mean", f"{origin} + {shift} / {_positive(emit, total)}")
    off = emit.line("off", f"{mean} - {middle}")
    within, between = summed(emit, m2, ok, axes), summed(emit, f"{n} * {off} * {off}", ok, axes)
    return total, middle, emit.line("m2", f"{within} + {between}")


def _chan_merge(emit: Emitter, state: Names, new: Names) -> Names:
    n = emit.line("n", f"{state[0]} + {new[0]}")
    share = emit.line("share", f"{new[0]} / {_positive(emit, n)}")
    step = emit.line("step", f"{new[1]} - {state[1]}")
    # An infinite mean stays, on either side: inf + (x - inf) * share would be NaN.
    mean = emit.line(
        "mean",
        f"tl.where({step} - {step} == 0.0, {state[1]} + {step} * {share}, {state[1]} + {new[1]})",
    )
    # In this order 0 columns times a square that overflows are 0, and not NaN.
    m2 = emit.line("m2", f"{state[2]} + {new[2]} + {step} * ({step} * ({state[0]} * {share}))")
    return n, mean, m2


_CHAN = ("0.0", "0.0", "0.0")
# (n - n) / n is 0, and NaN for no columns at all.
LOWERING.rule("rowmean")(
    Fold(_CHAN, _chan_block, _chan_stored, _chan_merge,
         lambda emit, s: f"{s[1]} + ({s[0]} - {s[0]}) / {s[0]}")
)  # fmt: skip
LOWERING.rule("rowvar")(
    Fold(_CHAN, _chan_block, _chan_stored, _chan_merge, lambda emit, s: f"{s[2]} / {s[0]}")
)


# ------------------------------------------------------------------- online log-sum-exp
def _shift(emit: Emitter, top: str) -> str:
    """The maximum where it is finite, else 0, so that infinities and NaN keep their meaning."""
    return emit.line("shift", f"tl.where(tl.abs({top}) < {INF}, {top}, 0.0)")


def _lse_block(emit: Emitter, e: Elements) -> Names:
    top = largest(emit, e.x, e.ok, e.axes)
    weight = emit.line("w", f"tl.where({e.ok}, tl.exp({e.x} - {_shift(emit, top)}), 0.0)")
    total = summed(emit, weight, e.ok, e.axes)
    if not e.extra:
        return top, total
    # 0 times an infinite payload is 0
    return (
        top,
        total,
        summed(emit, f"{weight} * {e.extra}", f"({e.ok}) & ({weight} != 0.0)", e.axes),
    )


def _lse_stored(emit: Emitter, parts: Names, ok: str, axes: tuple[int, ...]) -> Names:
    top = largest(emit, parts[0], ok, axes)
    scale = emit.line("scale", f"tl.exp({_shift(emit, parts[0])} - {_shift(emit, top)})")
    sums = (summed(emit, f"{s} * {scale}", f"({ok}) & ({s} != 0.0)", axes) for s in parts[1:])
    return top, *sums


def _lse_merge(emit: Emitter, state: Names, new: Names) -> Names:
    top = larger(emit, state[0], new[0])
    shift = _shift(emit, top)
    old, fresh = (
        emit.line("scale", f"tl.exp({_shift(emit, t)} - {shift})") for t in (state[0], new[0])
    )
    sums = (
        emit.line(
            "sum",
            f"tl.where({s} == 0.0, {s}, {s} * {old}) + tl.where({t} == 0.0, {t}, {t} * {fresh})",
        )
        for s, t in zip(state[1:], new[1:], strict=True)
    )
    return top, *sums


LOWERING.rule("rowlse")(
    Fold((f"-{INF}", "0.0"), _lse_block, _lse_stored, _lse_merge,
         lambda emit, s: f"{_shift(emit, s[0])} + tl.log({s[1]})")
)  # fmt: skip
LOWERING.rule("rowsoftmean")(
    Fold((f"-{INF}", "0.0", "0.0"), _lse_block, _lse_stored, _lse_merge,
         lambda emit, s: f"{s[2]} / {s[1]}")
)  # fmt: skip
