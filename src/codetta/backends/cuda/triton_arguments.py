"""Parameters of a generated kernel, declared as its source first mentions them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from codetta.backends.cuda.triton_task import Array, Parameter, Task

TRITON_DTYPES = {
    "bf16": "tl.bfloat16",
    "fp16": "tl.float16",
    "fp32": "tl.float32",
    "fp64": "tl.float64",
    "fp8e4nv": "tl.float8e4nv",
    "fp8e5": "tl.float8e5",
}
#: What Triton calls the fp8 dtypes of the language.
FP8 = {"e4m3": "fp8e4nv", "e5m2": "fp8e5"}
_LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
_NARROW = frozenset({"bf16", "fp16", "fp8e4nv", "fp8e5"})


def convert(text: str, given: str, wanted: str) -> str:
    """Expression of ``text``, of dtype ``given``, in dtype ``wanted``.

    Between fp64 and 16 bits the value passes through fp32, as in PyTorch. fp8 saturates.
    """
    if given == wanted:
        return text
    if "fp64" in (given, wanted) and _NARROW & {given, wanted}:
        text = f"{text}.to(tl.float32)"
        given = "fp32"
    if given != wanted and wanted in _LARGEST:
        top = _LARGEST[wanted]
        text = f"tl.clamp({text}, -{top}, {top}, tl.PropagateNan.ALL)"
    return text if given == wanted else f"{text}.to({TRITON_DTYPES[wanted]})"


@dataclass(frozen=True)
class TensorArgument:
    """A tensor as the source mentions it; names are declared when they are first used."""

    parameters: Parameters
    position: int
    array: Array

    @property
    def pointer(self) -> str:
        return self.parameters.declare(Parameter(f"x{self.position}", "pointer", self.position))

    @property
    def row_stride(self) -> str:
        name = f"x{self.position}_r"
        return self.parameters.divided(
            name, Parameter(name, "row", self.position, divided=self.array.aligned)
        )

    def along(self, index: str) -> str:
        """Offset of an index along the contiguous axis, the columns (of a Col: the rows)."""
        if self.array.contiguous:
            return index
        stride = self.parameters.declare(Parameter(f"x{self.position}_c", "col", self.position))
        return f"({index}).to(tl.int64) * {stride}"

    @property
    def size(self) -> str:
        """Rows of a rotary table; partials to combine."""
        return self.parameters.declare(Parameter(f"x{self.position}_t", "size", self.position))


class Parameters:
    """All parameters in order, and the lines that undo the division by 16."""

    def __init__(self, task: Task, arrays: tuple[Array, ...], aligned: frozenset[Fraction]) -> None:
        self._tensors, self._arrays, self._aligned = task.tensors, arrays, aligned
        self._declared: dict[str, Parameter] = {}
        self.header: list[str] = []

    @property
    def all(self) -> list[Parameter]:
        """Outputs first, then pointers, then integers, each in the order of their mention."""
        order = {"out": 0, "pointer": 1}
        return sorted(self._declared.values(), key=lambda p: (order.get(p.what, 2), p.position))

    def declare(self, parameter: Parameter) -> str:
        self._declared.setdefault(parameter.name, parameter)
        return parameter.name

    def divided(self, name: str, parameter: Parameter) -> str:
        """Declare an integer, and recover it where it is passed divided by 16."""
        if not parameter.divided:
            return self.declare(parameter)
        short = f"{name}_by16"
        if short not in self._declared:
            self.header.append(f"{name} = {short} * 16")
        self.declare(
            Parameter(short, parameter.what, parameter.position, parameter.width, divided=True)
        )
        return name

    def need(self, what: str) -> str:
        return self.declare(Parameter(what, what))

    def output(self, i: int) -> str:
        return self.declare(Parameter(f"o{i}", "out", i))

    def total(self, width: Fraction) -> str:
        """Number of columns of a width."""
        name = f"n{width.numerator}" + (f"_{width.denominator}" if width.denominator > 1 else "")
        return self.divided(name, Parameter(name, "cols", 0, width, divided=width in self._aligned))

    def tensor(self, operand: str) -> TensorArgument:
        """The only tensor of an operand, or its first."""
        return self.tensors(operand)[0]

    def tensors(self, operand: str) -> tuple[TensorArgument, ...]:
        """All tensors of an operand: of a rotary one the table and the positions."""
        start, roles = self._tensors[operand]
        return tuple(
            TensorArgument(self, i, self._arrays[i]) for i in range(start, start + len(roles))
        )
