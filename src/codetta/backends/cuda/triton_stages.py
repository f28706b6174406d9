"""How a program without accumulator becomes one kernel or two, and how their work is cut.

A kernel completes the reductions over columns by itself: it loops over the blocks of its rows and
finishes in registers. What needs all rows (column sums, a total) leaves a first kernel as partials,
one per chunk of rows, and a second, small kernel combines them and computes the finals: a finalizer
Program with ``combine`` nodes, made here, that goes through the same code generator. No atomics, so
the order of every sum is fixed. With ``raw`` there is one kernel and its chunks are the language's
tiles.

Cuts. The kernels are bound by memory, so a block is as large as keeps all loads in registers, 8 to
32 elements of each tile a thread (by the program's peak of live values), with enough columns side
by side for 16-byte accesses. Reductions over rows want tall blocks, because each block of rows
leaves a row of fp32 partials: 32 rows of bf16 cost 2 / 32 of an operand's traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from codetta.backends.cuda.triton_arguments import FP8
from codetta.backends.cuda.triton_columns import power_of_two
from codetta.backends.cuda.triton_task import COMBINED_AT_ONCE, Cut, Sink, Task
from codetta.backends.layout import Tile, default_tile
from codetta.language.functions import as_attribute
from codetta.language.primitives import REDUCTION, REDUCTIONS, ROW_REDUCTIONS
from codetta.language.program import Operand, Output, Program
from codetta.language.trace import ProgramTracer
from codetta.language.traffic import peak_registers
from codetta.language.types import Kind
from codetta.language.values import Value, attrs_of


@dataclass(frozen=True)
class Stages:
    """A first kernel, and a second where partials must be combined.

    Attributes:
        first: its outputs are results of the program, or partials for ``second``.
        second: the finalizer, or None.
        reads: for each tensor that ``second`` reads, (True, output of first) or
            (False, operand tensor of the program).
        flat: for each result of the program, (stage, output of that stage).
    """

    first: Task
    second: Task | None
    reads: tuple[tuple[bool, int], ...]
    flat: tuple[tuple[int, int], ...]


@lru_cache(maxsize=1024)
def stages(program: Program, operand: str, compute: str, raw: bool) -> Stages:
    """The kernels of a program; dtypes by their names in the language."""
    dtypes = {"operand": operand, "accumulator": compute, **FP8}
    sinks: list[Sink] = []
    flat: list[tuple[int, int]] = []
    partial: dict[int, int] = {}  # reduction -> its first output of the first kernel
    pending = dict(program.partial_names)
    later: list[Output] = []
    size = 0

    def add(kind: str, node: int, dtype: str, count: int) -> None:
        nonlocal size
        sinks.append(Sink(kind, node, dtypes.get(dtype, dtype)))
        size += count

    def add_partials(root: int) -> None:
        for i in program.reachable(root):
            if i in pending:
                del pending[i]
                partial[i] = size
                add("partial", i, compute, components(program, i))

    for out in program.outputs:
        before = size
        if not program.nodes[out.node].type.reduced:
            add("store", out.node, out.dtype, 1)
        elif raw:
            add_partials(out.node)
        elif _completes(program, out.node):
            add("final", out.node, out.dtype, 1)
        else:
            add_partials(out.node)
            flat.append((1, len(later)))
            later.append(out)
            continue
        flat += [(0, i) for i in range(before, size)]
    first = Task(program, tuple(sinks), operand, compute, raw)
    if not later:
        return Stages(first, None, (), tuple(flat))
    second, reads = _finalizer(program, later, partial)
    seconds = tuple(Sink("store", o.node, dtypes.get(o.dtype, o.dtype)) for o in second.outputs)
    return Stages(first, Task(second, seconds, operand, compute, False), reads, tuple(flat))


def components(program: Program, i: int) -> int:
    return len(REDUCTION[program.nodes[i].op].components)


def _completes(program: Program, root: int) -> bool:
    """The kernel that folds the reductions below ``root`` can also compute it: rows are enough."""
    stack = [root]
    while stack:
        node = program.nodes[stack.pop()]
        if node.type.has_cols or node.op in REDUCTIONS - ROW_REDUCTIONS:
            return False
        if node.op not in REDUCTIONS:
            stack.extend(node.args)
    return True


def _finalizer(
    program: Program, outputs: Sequence[Output], partial: dict[int, int]
) -> tuple[Program, tuple[tuple[bool, int], ...]]:
    """The program from partials to finals, and where its operand tensors come from."""
    tracer = ProgramTracer(f"{program.name}_final")
    operands: dict[str, Operand] = {}
    read: dict[str, list[tuple[bool, int]]] = {}
    done: dict[int, Value] = {}
    given = operand_positions(program)

    def declare(operand: Operand, tensors: list[tuple[bool, int]]) -> Value:
        operands[operand.name], read[operand.name] = operand, tensors
        return tracer.operand(operand)

    def value(i: int) -> Value:
        if i not in done:
            node = program.nodes[i]
            if node.op in REDUCTIONS:
                parts = [
                    declare(Operand(f"_part{i}_{c}", Kind.PARTIAL), [(True, partial[i] + c)])
                    for c in range(components(program, i))
                ]
                cols, path = as_attribute(node.type.cols), "/".join(node.type.path)
                kind = "totalsum" if node.type.kind is Kind.SCALAR else node.op
                done[i] = tracer.emit("combine", *parts, reduction=kind, width=cols, path=path)
            elif node.op == "operand":
                operand = program.operand(node.attr("name"))
                done[i] = declare(operand, [(False, t) for t in given[operand.name]])
            elif not node.args:
                done[i] = tracer.append(node)
            else:
                done[i] = tracer.emit(node.op, *map(value, node.args), **attrs_of(node))
        return done[i]

    made = [Output(o.name, value(o.node).id, o.dtype) for o in outputs]
    second = Program.build(
        tracer.name, list(operands.values()), tracer.nodes, made, allow_unused=True
    )
    return second, tuple(t for o in second.operands for t in read[o.name])


def operand_positions(program: Program) -> dict[str, list[int]]:
    """Positions of each operand's tensors in the flat list: a rotary operand is two."""
    found: dict[str, list[int]] = {}
    start = 0
    for operand in program.operands:
        stop = start + 1 + (operand.kind is Kind.ROTARY)
        found[operand.name], start = list(range(start, stop)), stop
    return found


# ------------------------------------------------------------------------------------- cuts
#: (most live tile values, elements of a tile per thread)
PER_THREAD = ((3, 32), (8, 16), (1 << 30, 8))


@dataclass(frozen=True, slots=True)
class Shape:
    """Defaults of a kind of kernel: columns of a block, most rows of a block, warps."""

    cols: int
    rows: int
    warps: int


#: Reductions over rows load and store vectors as wide as a block. If those had an element or more
#: per thread, Triton would lay out the tiles like the vectors: fewer columns than threads.
SHAPES = {
    "plain": Shape(512, 256, 4),
    "over_cols": Shape(1024, 32, 4),
    "over_rows": Shape(128, 32, 8),
    "combine": Shape(64, 32, 4),
}
#: Rows that one instance sums where nothing but columns is summed.
ROWS_OF_COLUMN_SUM = 128


def cut(task: Task, n: int, tile: Tile | None) -> Cut:
    """Blocks and chunks of a kernel over N columns; a function of N's power of two only."""
    piece = task.program.granule if task.has_cols else 1
    width = power_of_two(piece)
    combines = any(node.op == "combine" for node in task.live)
    kind = "over_rows" if task.over_rows else "over_cols" if task.over_cols else "plain"
    shape = SHAPES["combine" if combines else kind]
    live = peak_registers(task.program) + len(task.folded)
    live *= 2 if task.compute == "fp64" else 1
    elements = 32 * shape.warps * next(e for most, e in PER_THREAD if live <= most)
    tile_m, tile_n = tile or default_tile(task.program)
    if task.raw and task.folded:
        widest = power_of_two(-(-min(tile_n, power_of_two(n)) // piece))
        pieces = widest if task.over_rows else min(max(1, shape.cols // width), widest)
    elif task.has_cols:
        pieces = max(1, min(shape.cols, power_of_two(n)) // width)
    else:
        pieces = 1
    across = max(pieces * width, COMBINED_AT_ONCE if combines else 1)
    rows = max(1, min(elements // across, shape.rows)) if task.has_rows else 1
    by_columns = kind == "over_cols" or (task.over_cols and not task.raw)
    if task.raw and task.folded:
        rows = min(rows, power_of_two(tile_m))
        chunk = (rows if by_columns else tile_m), tile_n
    elif by_columns:
        chunk = rows, 0
    else:
        chunk = max(rows, ROWS_OF_COLUMN_SUM) if task.over_rows else rows, pieces * piece
    return Cut(by_columns, rows, pieces, piece, *chunk, shape.warps)
