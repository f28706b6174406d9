"""How a tensor of a PyTorch graph relates to a matrix of a Plan.

A Plan knows matrices (tokens, features), rows, columns and scalars. A graph holds tensors such as
(batch, heads, tokens, head size). A :class:`Form` says which axis of the tensor is which part of
the matrix: the token axes in order make M, the feature axes in order make N, axes of size 1 are
neither. So views, transposes and casts are bookkeeping and leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx.experimental.symbolic_shapes import statically_known_true

from codetta.language.values import Value

Size = Any  # int or SymInt


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a tensor: part ``index`` of the tokens ('m') or features ('n'); '' for size 1."""

    role: str
    index: int = 0


ONE = Axis("")


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor as a Plan value.

    Attributes:
        value: the matrix, row, column or scalar.
        axes: one per axis of the tensor.
        tokens: sizes of the token axes in the matrix's order; () where it has none.
        features: sizes of the feature axes in the matrix's order.
    """

    value: Value
    axes: tuple[Axis, ...]
    tokens: tuple[Size, ...] = ()
    features: tuple[int, ...] = ()

    @property
    def ordered(self) -> bool:
        """Token axes first, then features, each in the matrix's order."""
        found = [(a.role, a.index) for a in self.axes if a.role]
        return found == [
            *(("m", i) for i in range(len(self.tokens))),
            *(("n", i) for i in range(len(self.features))),
        ]

    def but(self, value: Value, axes: Sequence[Axis] | None = None) -> Form:
        return Form(value, self.axes if axes is None else tuple(axes), self.tokens, self.features)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A two-dimensional parameter (N, K), or its transpose."""

    value: Value
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns start to stop of the last feature axis of a form, with a sign: half of a rotation."""

    base: Form
    start: int
    stop: int
    negative: bool = False


@dataclass(frozen=True, slots=True)
class Swapped:
    """(-b, a) of the halves (a, b) of columns start to stop of the last feature axis."""

    base: Form
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Turned:
    """x ⊙ cos or (-b, a) ⊙ sin, waiting for the other: one summand of a rotation."""

    base: Form
    start: int
    stop: int
    swapped: bool
    table: Any  # the tensor of the table


@dataclass(frozen=True, slots=True)
class Rotated:
    """Columns start to stop of the last feature axis, rotated."""

    base: Form
    start: int
    stop: int
    cos: Any
    sin: Any


#: Stages of a rotation; none of them is a value of the Plan.
Virtual = Piece | Swapped | Turned | Rotated


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are equal, whatever the symbols stand for."""
    return bool(a == b) if isinstance(a, int) and isinstance(b, int) else known(a == b)


def known(condition: Any) -> bool:
    return bool(statically_known_true(condition))


def product(sizes: Sequence[Size]) -> Size:
    total: Size = 1
    for s in sizes:
        total = total * s
    return total


def viewed(form: Form, shape: Sequence[Size]) -> Form | None:
    """The form after ``view(shape)``; None where tokens and features would mix."""
    if not form.ordered:
        return None
    tokens, features = product(form.tokens), product(form.features)
    sizes = [s for s in shape if not same(s, 1)]
    for cut in range(len(sizes) + 1):
        left, right = sizes[:cut], sizes[cut:]
        if not same(product(left), tokens) or not same(product(right), features):
            continue
        if bool(form.tokens) != bool(left) or bool(form.features) != bool(right):
            continue
        if not all(isinstance(s, int) for s in right):
            return None
        axes, m, n = [], 0, 0
        for s in shape:
            if same(s, 1):
                axes.append(ONE)
            elif m < cut:
                axes.append(Axis("m", m))
                m += 1
            else:
                axes.append(Axis("n", n))
                n += 1
        return Form(form.value, tuple(axes), tuple(left), tuple(right))
    return None


def leading_axes(shape: Sequence[Size], features: int) -> tuple[tuple[Axis, ...], tuple[Size, ...]]:
    """Axes of a tensor whose last ``features`` axes are features; and its token sizes."""
    axes: list[Axis] = []
    tokens: list[Size] = []
    for i, s in enumerate(shape):
        if same(s, 1):
            axes.append(ONE)
        elif i < len(shape) - features:
            axes.append(Axis("m", len(tokens)))
            tokens.append(s)
        else:
            axes.append(Axis("n", 0))
    return tuple(axes), tuple(tokens)
