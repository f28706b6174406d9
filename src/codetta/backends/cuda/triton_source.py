"""From a Program without accumulator to the source of one Triton kernel.

    source(task, cut, arrays, aligned) -> Source(text, name, parameters)

The text is plain Python with one ``@triton.jit`` function, numbers written out, sizes and strides
as arguments. It is a function of the arguments alone, and its hash is part of the kernel's name.

    def swiglu_backward_1_<hash>(o0, o1, x0, x0_r16, ..., M, n1_16):
        pid ...                       # which rows and columns
        OUTER                         # loads and arithmetic that do not change in the loop
        s5_0 = ...                    # states of the reductions that the loop carries
        for step in range(...):       # over blocks of columns, or of rows
            INNER                     # loads, arithmetic, stores, folds
        AFTER                         # what reductions become, stores of vectors

Values are asked for from the outputs down (:meth:`Emitter.value`), at blocks of columns
(triton_columns.py), and each lands in the section where the axes it has are known. The expressions
are those of LOWERING (triton_lowering.py, triton_folds.py). Compute is fp32, or fp64 where an
operand is; every store rounds once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from codetta.backends.cuda import triton_folds  # noqa: F401  (fills LOWERING)
from codetta.backends.cuda.triton_arguments import FP8, TRITON_DTYPES, Parameters, convert
from codetta.backends.cuda.triton_columns import Columns, ColumnSpace, Val
from codetta.backends.cuda.triton_loads import load
from codetta.backends.cuda.triton_lowering import LOWERING
from codetta.backends.cuda.triton_outputs import combine, write
from codetta.backends.cuda.triton_task import Array, Cut, Parameter, Task
from codetta.language.primitives import REDUCTIONS
from codetta.language.types import Type
from codetta.language.values import Node

OUTER, INNER, AFTER = "outer", "inner", "after"


@dataclass(frozen=True, slots=True)
class Source:
    """A generated module: its text, the kernel's name and its parameters in order."""

    text: str
    name: str
    parameters: tuple[Parameter, ...]


def source(task: Task, cut: Cut, arrays: tuple[Array, ...], aligned: frozenset[Fraction]) -> Source:
    """Source of the kernel that does ``task``, cut as ``cut`` says.

    Args:
        arrays: classes of the operand tensors, in the flat order of the operators.
        aligned: widths whose number of columns is a multiple of 16.

    Raises:
        MissingRule: a primitive has no lowering.
    """
    emit = Emitter(task, cut, arrays, aligned)
    write(emit)
    body = emit.body()
    declared = ", ".join(p.declaration for p in emit.parameters.all)
    digest = hashlib.sha256(f"{declared}\n{cut}\n{body}".encode()).hexdigest()
    name = f"{task.program.name}_{digest[:16]}"
    integers = [p.name for p in emit.parameters.all if p.is_integer]
    text = (
        "import triton\nimport triton.language as tl\n\n\n"
        f"@triton.jit(do_not_specialize={integers!r})\n"
        f"def {name}({declared}):\n" + body
    )
    return Source(text, name, tuple(emit.parameters.all))


class Emitter:
    """Emits the sections of one kernel; the rules of LOWERING see it as ``emit``."""

    def __init__(
        self, task: Task, cut: Cut, arrays: tuple[Array, ...], aligned: frozenset[Fraction]
    ) -> None:
        self.task, self.cut, self.program = task, cut, task.program
        self.compute, self.dtype = task.compute, TRITON_DTYPES[task.compute]
        self.parameters = Parameters(task, arrays, aligned)
        self.sections: dict[str, list[str]] = {OUTER: [], INNER: [], AFTER: []}
        self.row_section = OUTER if cut.by_columns else INNER
        self.col_section = INNER if cut.by_columns else OUTER
        self._at, self._indent, self._count = self.col_section, "", 0
        self._values: dict[tuple[int, Any], Val] = {}
        self._seen: dict[Any, Any] = {}
        self.layout = task.pair_layout(cut.piece)
        self.columns = ColumnSpace(
            lambda prefix, text: self.line(prefix, text, self.col_section),
            self.parameters.total, self._limit, self._start, cut.pieces, cut.piece, cut.inside,
        )  # fmt: skip

    # ---- sections and lines
    @contextmanager
    def at(self, section: str) -> Iterator[None]:
        """Lines without a section of their own go to this one."""
        previous, self._at = self._at, section
        yield
        self._at = previous

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        """A nested loop in the current section."""
        self.statement(header)
        self._indent += "    "
        yield
        self._indent = self._indent[4:]

    def statement(self, text: str) -> None:
        self.sections[self._at].append(self._indent + text)

    def line(self, prefix: str, expression: str, section: str | None = None) -> str:
        """Emit ``fresh name = expression``; returns the name."""
        name = f"{prefix}_{self._count}"
        self._count += 1
        with self.at(section or self._at):
            self.statement(f"{name} = {expression}")
        return name

    def once(self, key: Any, prefix: str, expression: str, section: str) -> str:
        if key not in self._seen:
            self._seen[key] = self.line(prefix, expression, section)
        name: str = self._seen[key]
        return name

    def section(self, rows: bool, cols: int, after: bool = False) -> str:
        """Where a value with these axes is known."""
        if after:
            return AFTER
        looped = cols if self.cut.by_columns else rows
        return INNER if looped else OUTER

    # ---- shapes
    def height(self, rows: bool) -> int:
        return self.cut.rows if rows else 1

    def full(self, x: Val, rows: bool, cols: int) -> Val:
        """x broadcast to a block of this shape."""
        if (x.rows, x.cols) == (rows, cols):
            return x
        shape = f"[{self.height(rows)}, {max(cols, 1)}]"
        name = self.line(
            "x", f"tl.broadcast_to({x.name}, {shape})", self.section(rows, cols, x.after)
        )
        return Val(name, rows, cols, x.after)

    def apply(self, template: str, *args: Val, cols: int | None = None) -> Val:
        """An expression of values; ``cols`` if its block is not that of the arguments."""
        rows, after = any(a.rows for a in args), any(a.after for a in args)
        wide = max((a.cols for a in args), default=0) if cols is None else cols
        section = self.section(rows, wide, after)
        text = template.format(*(a.name for a in args))
        key = (text, section)
        return Val(self.once(key, "v", text, section), rows, wide, after)

    def split(self, x: Val) -> tuple[Val, Val]:
        """Both members of adjacent pairs."""
        if not x.cols:
            return x, x
        if ("split", x.name) not in self._seen:
            a, b = f"a_{self._count}", f"b_{self._count}"
            self._count += 1
            with self.at(self.section(x.rows, x.cols, x.after)):
                shape = f"[{self.height(x.rows)}, {x.cols // 2}, 2]"
                self.statement(f"{a}, {b} = tl.split(tl.reshape({x.name}, {shape}))")
            self._seen["split", x.name] = tuple(
                Val(name, x.rows, x.cols // 2, x.after) for name in (a, b)
            )
        pair: tuple[Val, Val] = self._seen["split", x.name]
        return pair

    def join(self, a: Val, b: Val, block: int) -> Val:
        """Adjacent pairs of two values; ``block`` pairs."""
        rows = a.rows or b.rows
        a, b = self.full(a, rows, block), self.full(b, rows, block)
        template = f"tl.reshape(tl.join({{0}}, {{1}}), [{self.height(rows)}, {2 * block}])"
        return self.apply(template, a, b, cols=2 * block)

    # ---- sizes and positions
    def _limit(self, width: Fraction) -> str:
        """End of the columns that this chunk may touch."""
        total, chunk = self.parameters.total(width), self.cut.chunk_cols
        if not chunk or chunk % self.cut.cols == 0:
            return total
        end = f"tl.minimum({total}, (pid_n + 1) * {int(chunk * width)})"
        return self.once(("end", width), "end", end, OUTER)

    def _start(self, width: Fraction) -> str:
        chunk = self.cut.chunk_cols or (0 if self.cut.by_columns else self.cut.cols)
        text = f"pid_n * {int(chunk * width)}"
        if self.cut.by_columns and self.cut.steps != 1:
            text = (f"{text} + " if chunk else "") + f"step * {int(self.cut.cols * width)}"
        return text

    @property
    def rows(self) -> str:
        """Row numbers (rows, 1), int64."""
        return self.once("rows", "rows", f"{self.rows_flat}[:, None]", self.row_section)

    @property
    def rows_ok(self) -> str:
        """True for rows inside the matrix, (rows, 1)."""
        return self.once("rows_ok", "in_m", f"{self.rows_ok_flat}[:, None]", self.row_section)

    @property
    def rows_flat(self) -> str:
        """Row numbers (rows,); vectors over rows are loaded so, once per row and thread."""
        start = f"pid_m.to(tl.int64) * {self.cut.chunk_rows}"
        if not self.cut.by_columns and self.cut.steps != 1:
            start += f" + step * {self.cut.rows}"
        text = f"{start} + tl.arange(0, {self.cut.rows})"
        return self.once("flat", "r", text, self.row_section)

    @property
    def rows_ok_flat(self) -> str:
        chunk, end = self.cut.chunk_rows, self.parameters.need("M")
        if chunk % self.cut.rows:
            end = f"tl.minimum(M, (pid_m.to(tl.int64) + 1) * {chunk})"
        return self.once("flat_ok", "r_ok", f"{self.rows_flat} < {end}", self.row_section)

    # ---- values
    def value(self, i: int, at: Columns | None) -> Val:
        """Node i at these columns."""
        node = self.program.nodes[i]
        where = at if node.type.has_cols else None
        key = (i, where.key if where else None)
        if key not in self._values:
            self._values[key] = self._compute(node, where)
        return self._values[key]

    def completed(self, i: int, value: Val) -> None:
        """Reduction i is known."""
        self._values[i, None] = value

    def _compute(self, node: Node, at: Columns | None) -> Val:
        assert node.op not in REDUCTIONS and node.op != "acc", node.op
        if node.op == "operand":
            return load(self, node, at)
        if node.op == "const":
            return self.const(node.attr("value"))
        if node.op == "extent":
            if node.attr("axis") == "m":
                self.parameters.need("M")
                size = "M"
            else:
                size = self.parameters.total(Fraction(node.attr("width")))
            return self.apply(f"tl.full([1, 1], {size}, {self.dtype})")
        result: Val = LOWERING[node.op](self, node, at)
        return result

    def const(self, number: float) -> Val:
        text = repr(number) if number - number == 0 else f"float('{number}')"
        return self.apply(f"tl.full([1, 1], {text}, {self.dtype})")

    def storage(self, dtype: str) -> str:
        """Storage dtype by its name in the language."""
        names = {"operand": self.task.operand, "accumulator": self.compute, **FP8}
        return names.get(dtype, dtype)

    def convert(self, text: str, given: str, wanted: str) -> str:
        return convert(text, given, wanted)

    def combine(self, node: Node, reduction: str, at: Columns | None) -> Val:
        names = [self.program.nodes[a].attr("name") for a in node.args]
        return combine(self, names, reduction, at)

    # ---- covering a tile
    def cover(self, type_: Type) -> tuple[Columns | None, ...]:
        """Blocks that together are the columns of this tile of a value, in a convenient order."""
        if not type_.has_cols:
            return (None,)
        last = type_.path[-1].removeprefix("expand:") if type_.path else ""
        expanded = last.startswith("halves") and type_.path[-1].startswith("expand:")
        expanded = expanded and (self.cut.piece * type_.cols / 2).denominator == 1
        if expanded and not (self.task.raw and last == "halves"):
            q = self.columns.natural(type_.cols / 2)
            return tuple(self.columns.member(q, last, k) for k in (0, 1))
        if self.layout and type_.cols == 1 and not type_.path:
            q = self.columns.natural(Fraction(1, 2))
            return tuple(self.columns.member(q, self.layout, k) for k in (0, 1))
        return (self.columns.natural(type_.cols),)

    # ---- the text
    def body(self) -> str:
        loop = self.cut.steps != 1 and bool(self.sections[INNER])
        steps = str(self.cut.steps)
        if loop and not self.cut.steps:
            steps = f"tl.cdiv({self.parameters.total(Fraction(1))}, {self.cut.cols})"
        lines = ["pid = tl.program_id(0)"]
        if self.task.has_cols and (self.cut.chunk_cols or not self.cut.by_columns):
            self.parameters.need("chunks")
            lines += ["pid_m = pid // chunks", "pid_n = pid % chunks"]
        else:
            lines += ["pid_m = pid", "pid_n = pid * 0"]
        lines += self.parameters.header + self.sections[OUTER]
        if loop:
            lines.append(f"for step in range({steps}):")
        lines += ["    " * loop + x for x in self.sections[INNER]]
        lines += self.sections[AFTER]
        return "".join(f"    {x}\n" for x in lines)
