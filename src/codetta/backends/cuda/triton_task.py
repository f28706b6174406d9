"""What one generated kernel computes and how its work is cut: the input of the code generator.

Everything here is hashable and small; together with the arrays' classes it is the identity of a
kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from codetta.language.primitives import COL_REDUCTIONS, REDUCTIONS
from codetta.language.program import Operand, Program
from codetta.language.types import Kind
from codetta.language.values import Node

#: Partials that a finalizer loads at once, along the axis it combines.
COMBINED_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Sink:
    """Something a kernel writes.

    Attributes:
        kind: 'store' (a value), 'final' (a value made of reductions completed in this kernel) or
            'partial' (the raw state of a reduction, one tensor per component).
        node: number of the node.
        dtype: storage dtype, 'bf16', 'fp16', 'fp32' or 'fp64'.
    """

    kind: str
    node: int
    dtype: str


@dataclass(frozen=True)
class Task:
    """One kernel's share of a program.

    Attributes:
        program: without an accumulator.
        sinks: in the order of the output tensors.
        operand, compute: dtypes that 'operand' and 'accumulator' stand for.
        raw: tiles must be those of the language, because partials per tile are asked for.
        gathered: (tile operand, number of matrices) where the rows of an operand come from several
            matrices, as a table says.
    """

    program: Program
    sinks: tuple[Sink, ...]
    operand: str
    compute: str
    raw: bool
    gathered: tuple[tuple[str, int], ...] = ()

    @cached_property
    def tensors(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """Of each operand: position of its first tensor in the flat list, and the roles."""
        found, start = {}, 0
        for operand in self.program.operands:
            roles = self._roles(operand)
            found[operand.name] = (start, roles)
            start += len(roles)
        return found

    def _roles(self, operand: Operand) -> tuple[str, ...]:
        """'tile', 'row', 'col', 'scalar'; 'table' and 'positions'; a partial by its combine:
        'over_cols' (M, T), 'over_rows' (T, N) or 'total'; 'map', the table of gathered rows."""
        count = dict(self.gathered).get(operand.name)
        if count is not None:
            return ("tile",) * count + ("map",)
        if operand.kind is Kind.ROTARY:
            return ("table", "positions")
        if operand.kind is not Kind.PARTIAL:
            vectors = {Kind.TILE: "tile", Kind.ROW: "row", Kind.SCALAR: "scalar"}
            return (vectors.get(operand.kind, "col"),)
        nodes = self.program.nodes
        leaf = next(i for i, x in enumerate(nodes) if dict(x.attrs).get("name") == operand.name)
        op = next(x.attr("reduction") for x in nodes if leaf in x.args)
        rows = "over_rows" if op in COL_REDUCTIONS else "over_cols"
        return ("total" if op == "totalsum" else rows,)

    @cached_property
    def folded(self) -> tuple[int, ...]:
        """Reductions this kernel folds, in node order."""
        found: set[int] = set()
        for s in self.sinks:
            if s.kind == "partial":
                found.add(s.node)
            elif s.kind == "final":
                found.update(set(self.program.reachable(s.node)) & set(self.program.reductions))
        return tuple(sorted(found))

    @cached_property
    def has_rows(self) -> bool:
        return any(n.type.has_rows for n in self.live)

    @cached_property
    def has_cols(self) -> bool:
        return any(n.type.has_cols for n in self.live)

    @cached_property
    def live(self) -> tuple[Node, ...]:
        """The nodes that the sinks depend on."""
        nodes = self.program.nodes
        reached = {i for s in self.sinks for i in self.program.reachable(s.node)}
        return tuple(nodes[i] for i in sorted(reached))

    def pair_layout(self, piece: int) -> str:
        """The halves layout in which whole-width values are taken apart, '' if there is none.

        Members of one layout are then static, so that nothing is computed twice. ``piece``: columns
        that a block holds together; halves of a head must lie in one.
        """
        if self.program.uses_halves:
            return "halves"
        for node in self.live:
            pairs, full = str(dict(node.attrs).get("pairs", "")), node.type.cols == 1
            if node.op == "rotate":
                whole = pairs == "halves" and node.attr("head_dim") == node.attr("rotary_dim")
                pairs = f"halves:{node.attr('head_dim')}" if whole else ""
            elif node.op == "unpack":
                full = node.type.cols == Fraction(1, 2)
            if full and pairs.startswith("halves:") and piece % int(pairs.split(":")[1]) == 0:
                return pairs
        return ""

    @cached_property
    def widths(self) -> tuple[Fraction, ...]:
        """Widths, of values and of the members of pairs, whose alignment a kernel may rely on."""
        found = {n.type.cols for n in self.live if n.type.has_cols} | {Fraction(1)}
        return tuple(sorted(found | {w / 2 for w in found}))

    @cached_property
    def over_rows(self) -> bool:
        """A reduction over rows is folded."""
        ops = {self.program.nodes[i].op for i in self.folded}
        return bool(ops & (COL_REDUCTIONS | {"totalsum"}))

    @cached_property
    def over_cols(self) -> bool:
        """A reduction over the columns of a row is folded."""
        ops = {self.program.nodes[i].op for i in self.folded}
        return bool(ops & (REDUCTIONS - COL_REDUCTIONS - {"totalsum"}))


@dataclass(frozen=True, slots=True)
class Cut:
    """How the matrix is cut into instances and blocks.

    An instance handles a chunk of rows and columns, in blocks, in a loop over one of the two axes.

    Attributes:
        by_columns: the loop runs over columns, and the chunk is one block of rows; otherwise it
            runs over rows, and the chunk is one block of columns.
        rows: rows of a block, a power of two.
        pieces: pieces of the block's columns (see Run), a power of two.
        piece: columns of a piece, a multiple of the program's granule.
        chunk_rows: rows of a chunk.
        chunk_cols: columns of a chunk, 0 for whole rows.
        warps: warps of an instance.
    """

    by_columns: bool
    rows: int
    pieces: int
    piece: int
    chunk_rows: int
    chunk_cols: int
    warps: int

    @property
    def cols(self) -> int:
        """Columns of a block, at width 1."""
        return self.pieces * self.piece

    @property
    def inside(self) -> bool:
        """Every block is one piece, of which N is a multiple, and no chunk ends within it."""
        whole = self.chunk_cols == self.cols or (self.by_columns and not self.chunk_cols)
        return self.pieces == 1 and self.piece > 1 and whole

    @property
    def steps(self) -> int:
        """Blocks of a chunk, 0 if that depends on N."""
        if not self.by_columns:
            return -(-self.chunk_rows // self.rows)
        return -(-self.chunk_cols // self.cols)


@dataclass(frozen=True, slots=True)
class Array:
    """Class of a tensor argument.

    Attributes:
        dtype: 'bf16', ..., 'i64'.
        contiguous: neighbouring columns are neighbours in memory (for a Col: rows).
        aligned: the row stride is a multiple of 16 elements.
    """

    dtype: str
    contiguous: bool
    aligned: bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a generated kernel.

    Attributes:
        name: in the source.
        what: 'out', 'pointer', 'row' (stride), 'col' (stride), 'size', 'M', 'cols' or 'chunks'.
        position: of the output or operand tensor.
        width: for 'cols', the width whose columns it counts.
        divided: it is passed divided by 16, which tells the compiler that it is a multiple.
    """

    name: str
    what: str
    position: int = 0
    width: Fraction = Fraction(1)
    divided: bool = False

    @property
    def is_integer(self) -> bool:
        return self.what not in ("out", "pointer")

    @property
    def type(self) -> str:
        """Triton type of an integer: strides and rows reach beyond 2^31."""
        return "i32" if self.what in ("cols", "chunks", "size") else "i64"

    @property
    def declaration(self) -> str:
        return f"{self.name}: tl.int{self.type[1:]}" if self.is_integer else self.name
