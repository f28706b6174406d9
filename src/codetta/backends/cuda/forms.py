"""What lowering produces: an epilogue in one of QuACK's three forms, and what its call needs."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch

from codetta.backends.cuda.rules import NotLowerable
from codetta.language.program import Output, Program

ELEMENT, PAIR, PACKED = "element", "acc_pair", "packed_cd_b16x2"
#: Width of one lane, by form.
UNIT = {ELEMENT: Fraction(1), PAIR: Fraction(1, 2), PACKED: Fraction(1)}
#: cutlass type of the storage dtypes narrower than fp32.
CUTLASS = {
    "bf16": "BFloat16",
    "fp16": "Float16",
    "e4m3": "Float8E4M3FN",
    "e5m2": "Float8E5M2",
}
#: dtypes of a that the mainloop takes, by the name that lowering knows them by.
MAINLOOP = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
#: Folds that keep numbers of their own per row, and how many: planes of their buffer.
STATES = {"maximum": 1, "softmax": 2, "softmean": 3, "moments": 3}
#: Storage dtypes of what QuACK writes at another width than the accumulator's.
HALF = ("bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Load:
    """One parameter of the epilogue function.

    Attributes:
        name: of the parameter.
        port: 'c', 'tile', 'row', 'col', 'scalar', 'extent', 'rotary', 'turns', 'onehot', 'valid_n'
            or 'valid_m': what kind of array it is, and so which EpiOp loads it.
        operand: the program's operand behind it, "" where there is none.
        part: for a row as wide as two lanes of a packed program, which of the two.
        detail: for 'extent' its axis and width, for 'rotary' (head_dim, rotary_dim), for 'turns'
            (head_dim, rotary_dim, heads).
    """

    name: str
    port: str
    operand: str = ""
    part: int = 0
    detail: tuple[str | int | Fraction, ...] = ()


@dataclass(frozen=True, slots=True)
class Sink:
    """One reduction the kernel carries out; raw partials are made of the buffers of one or two.

    Attributes:
        name: of the value the function returns.
        fold: 'add', 'max', 'maximum' (NaN kept), 'softmax' (max, sum), 'softmean' (max, sum,
            payload), 'moments' (count, mean, m2) or 'select'.
        over: 'n' (one value per row and tile) or 'm'.
        scaled: the function returns the factors of a product.
        operand: the Index operand of a 'select', and ``index`` the parameter that carries it.
    """

    name: str
    fold: str
    over: str
    scaled: bool = False
    operand: str = ""
    index: str = ""


@dataclass(frozen=True, slots=True)
class Partials:
    """How the raw partial of a reduction node follows from sinks.

    how: 'same' (the sinks' own planes), 'nan_max' (maximum plus the sum of NaNs), 'even' (every
    second column), 'interleave' (columns of two sinks in turn), 'rows' (summed over row tiles).
    """

    node: int
    how: str
    sinks: tuple[str, ...]


@dataclass(frozen=True)
class Lowered:
    """An epilogue in QuACK's form.

    Attributes:
        source: text of the module; ``epilogue`` in it is the EpiMod.
        mode: 'element', 'acc_pair' or 'packed_cd_b16x2'.
        d: the store that is D, None if there is none; ``aux`` the others, by parameter name.
        ragged: axes ('n', 'm') whose edge tiles this code handles.
        wide: matrices that it loads are fp32, twice as large in shared memory.
    """

    program: Program
    operand: str
    source: str
    mode: str
    loads: tuple[Load, ...]
    sinks: tuple[Sink, ...]
    partials: tuple[Partials, ...]
    d: Output | None
    aux: tuple[tuple[str, Output], ...]
    ragged: frozenset[str]
    wide: bool = False

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Columns of the rotary tables, of which a tile must hold a multiple or a divisor."""
        return tuple(period(int(x.detail[0])) for x in self.loads if x.port == "rotary")

    @property
    def tiles(self) -> int:
        """Matrices the epilogue loads."""
        return sum(x.port in ("c", "tile", "rotary") for x in self.loads)


def period(head_dim: int) -> int:
    """Columns of a rotary table: whole heads, and no narrower than a TMA box of 32 columns."""
    columns = head_dim
    while columns % 32:
        columns += head_dim
    return columns


def storage(dtype: str, operand: str) -> str:
    """Storage dtype by its name: 'bf16', 'fp16', 'fp32', 'e4m3' or 'e5m2'."""
    default = "bf16" if operand == "fp8" else operand
    name = {"operand": default, "accumulator": "fp32"}.get(dtype, dtype)
    if name == "fp64":
        raise NotLowerable("an fp64 store")
    return name
