"""How a program without accumulator becomes one kernel or two, and how their work is cut.

A kernel completes the reductions over columns by itself: it loops over the blocks of its rows and
finishes in registers. What needs all rows (column sums, a total) leaves a first kernel as partials,
one per chunk of rows, and a second, small kernel combines them and computes the finals: a finalizer
Program with ``combine`` nodes, made here, that goes through the same code generator. No atomics, so
the order of every sum is fixed. With ``raw`` there is one kernel and its chunks are the language's
tiles.

Cuts. The kernels are bound by memory, and what tells a good cut from a bad one is how many bytes
are on their way, against what an instance costs:

- A thread holds 16 elements of each tile, two accesses of 16 bytes, in a kernel that passes once
  over its block. 32 take twice the registers: no more elements are on their way, and an instance
  stores later what it loaded at once. 8 halve what is on its way.
- The GPU starts about 1.5 instances a nanosecond, whatever they do: a cut of 65536 instances of one
  row or four took 0.043 ms for 68 and for 134 MB. An instance should move 4 KB.
- Two warps are enough for that as soon as two tiles are moved. More wait for each other at every
  exchange through shared memory. But vectors along the columns are read again, from a cache, in
  each block of rows: where that would be more than half of what the tiles take, four warps share
  them.
- A kernel that loops ends each step in sums across its threads, whose latency only other elements
  can hide: a thread holds 32. Registers bound that, and in taller threads they hold more elements,
  because addresses, masks and numbers per row serve several: the backward of a rotary embedding and
  head norms had 4096 elements on an SM with 16 a thread when it was measured, 8192 with 32. Today
  it takes fewer registers: 6144 and 8192.

Reductions over rows load and store vectors as wide as a block, or half as wide where a tile is
taken apart into halves. They want twice as many threads as a vector has columns: with an element or
more per thread Triton lays out the tiles like the vectors, in accesses of 4 bytes. So 64 columns
take four warps and 128 eight, which hold 16 elements of 32 rows. They want tall blocks, because
each chunk of rows leaves a row of fp32 partials: 32 rows of bf16 cost 2 / 32 of an operand's
traffic.

Milliseconds of the programs of 32 MB and more in a step of Qwen3-0.6B (q) and Llama-1B (l), 16384
rows, in blocks back to back; one cut of one kernel may differ by 30 % between two layers:

    program                    rows, warps   ms      former rule   best of 15
    q row sum of squares       16, 4         0.0108  0.0115        0.0107
    q head norms, rotary       4, 4          0.0883  0.0887        0.0853
    q same, another layer      4, 4          0.0886  0.0863        0.0850
    q scale by row and column  2, 2          0.0189  0.0222        0.0189
    q row sum, 2 tiles         8, 2          0.0195  0.0195        0.0195
    q RMS norm backward        2, 2          0.0267  0.0284        0.0266
    q head norms backward      32, 4         0.2422  0.3968        0.2093
    q same, another layer      32, 4         0.2463  0.5057        0.2463
    l row sum of squares       16, 4         0.0193  0.0194        0.0193
    l scale by row and column  2, 2          0.0358  0.0355        0.0349
    l row sum, 2 tiles         8, 2          0.0349  0.0416        0.0349
    l RMS norm backward        2, 2          0.0499  0.0519        0.0498
    l rotary backward          8, 2          0.0805  0.0938        0.0803
    l same, another layer      8, 2          0.0814  0.0940        0.0814

Source: ``python benchmarks/tune_pointwise.py --out results --model qwen3-0.6b`` and ``llama-1b``,
one H200, 2026-12-03, commit 8c4abfe. Since then the kernels of head norms exchange less between
threads; compiled for sm_90a, a step of their backward's loop takes 18 shuffles instead of 100, 2
barriers instead of 10 and 31.5 instead of 39.1 instructions per element.
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
from codetta.language.traffic import BYTES, peak_registers
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
@dataclass(frozen=True, slots=True)
class Shape:
    """Defaults of a kind of kernel.

    Attributes:
        cols: columns of a block.
        rows: most rows of a block.
        elements: most elements of a tile per thread.
        registers: most live tile values of a thread; they and addresses share 255 registers.
    """

    cols: int
    rows: int
    elements: int
    registers: int


#: 'tile': sums of the columns of one of the language's tiles, in one pass.
SHAPES = {
    "plain": Shape(512, 256, 16, 128),
    "tile": Shape(1024, 32, 16, 128),
    "over_cols": Shape(1024, 32, 32, 128),
    "over_rows": Shape(128, 32, 32, 240),
    "combine": Shape(64, 32, 16, 128),
}
#: Bytes that an instance should move; what vectors may add to that from a cache.
MOVED, CACHED = 4096, 0.5
#: Rows that one instance sums where nothing but columns is summed.
ROWS_OF_COLUMN_SUM = 128


def cut(task: Task, n: int, tile: Tile | None) -> Cut:
    """Blocks and chunks of a kernel over N columns; a function of N's power of two only."""
    piece = task.program.granule if task.has_cols else 1
    width = power_of_two(piece)
    combines = any(node.op == "combine" for node in task.live)
    kind = _kind(task)
    shape = SHAPES["combine" if combines else kind]
    each = _elements(task, shape)
    tile_m, tile_n = tile or default_tile(task.program)
    if task.raw and task.folded:
        widest = power_of_two(-(-min(tile_n, power_of_two(n)) // piece))
        pieces = widest if task.over_rows else min(max(1, shape.cols // width), widest)
    elif task.has_cols:
        pieces = max(1, min(shape.cols, power_of_two(n)) // width)
    else:
        pieces = 1
    across = max(pieces * width, COMBINED_AT_ONCE if combines else 1)

    def rows_of(warps: int) -> int:
        return max(1, min(32 * warps * each // across, shape.rows)) if task.has_rows else 1

    warps = 4
    if kind == "over_rows":
        vector = across // 2 if task.pair_layout(piece) else across
        warps = min(max(4, 2 * vector // 32), 8)
    elif not combines and kind != "over_cols" and _two_warps(task, rows_of(2), across):
        warps = 2
    rows = rows_of(warps)
    by_columns = kind in ("tile", "over_cols") or (task.over_cols and not task.raw)
    if task.raw and task.folded:
        rows = min(rows, power_of_two(tile_m))
        chunk = (rows if by_columns else tile_m), tile_n
    elif by_columns:
        chunk = rows, 0
    else:
        chunk = max(rows, ROWS_OF_COLUMN_SUM) if task.over_rows else rows, pieces * piece
    return Cut(by_columns, rows, pieces, piece, *chunk, warps)


def _kind(task: Task) -> str:
    if task.over_rows:
        return "over_rows"
    return ("tile" if task.raw else "over_cols") if task.over_cols else "plain"


def _elements(task: Task, shape: Shape) -> int:
    """Elements of a tile per thread: a power of two, by the program's peak of live values."""
    live = peak_registers(task.program) + len(task.folded)
    live *= 2 if task.compute == "fp64" else 1
    each = shape.elements
    while each > 8 and live * each > shape.registers:
        each //= 2
    return each


def _two_warps(task: Task, rows: int, cols: int) -> bool:
    """A block of two warps moves enough bytes, and enough for the vectors it reads."""
    program, width = task.program, BYTES.get(task.operand, 1)
    moved = sum(
        width * n.type.cols for n in task.live if n.op == "operand" and n.type.kind is Kind.TILE
    ) + sum(
        BYTES.get(s.dtype, 1) * t.cols
        for s in task.sinks
        for t in [program.nodes[s.node].type]
        if s.kind == "store" and t.has_rows and t.has_cols
    )
    vectors = sum(
        BYTES[task.compute] * n.type.cols
        for n in task.live
        if n.op == "operand" and n.type.kind is Kind.ROW
    )
    return bool(rows * cols * moved >= MOVED and vectors <= CACHED * rows * moved)
