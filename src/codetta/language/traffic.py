"""What a Program costs: bytes, arithmetic and registers, from its text and the sizes alone.

Three limits decide whether an epilogue is free. Memory: every operand is read once and every output
written once, a reduction as one partial per tile. Arithmetic: plain and special-function operations
of the COST table, per element, against 2 M N K of the main loop. Registers: the tile stays in
registers, so the values alive at once, in 32-bit registers per accumulator element, must fit beside
the accumulator (a Hopper consumer warp group has some 200 a thread, the accumulator of a 128 x 256
tile takes 128 of them).

The numbers are a model, for comparing programs: caches are ignored, a and b count once, and the
registers are those of a straightforward schedule in node order that reuses dead values in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from codetta.language.primitives import COST, REDUCTION, REDUCTIONS
from codetta.language.program import Program
from codetta.language.types import Kind, Type
from codetta.language.values import Node

#: Bytes of a storage dtype by its name in the language; 'operand' and 'accumulator' are given.
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "e4m3": 1, "e5m2": 1}
#: Bytes of what is stored in, or loaded as, the operand dtype: where a is fp8, that is bf16.
_NARROWEST = 2
#: Results that are only another view of their arguments' registers.
_VIEWS = frozenset({"unpack", "pack", "broadcast", "ungroup"})
_INDEX_BYTES = 8


@dataclass(frozen=True)
class Traffic:
    """Cost of one run of a Program.

    Attributes:
        read: bytes read by name: "a" and "b" where there is a GEMM, and the operands.
        written: bytes written by name: stores, and the raw partials of the reductions.
        flops: plain floating-point operations of the program, main loop excluded.
        special: special-function operations (exp, rsqrt, tanh, ...).
        mainloop_flops: 2 M N K, 0 without an accumulator.
        registers: peak of live 32-bit registers per accumulator element, itself included.
    """

    read: Mapping[str, int] = field(default_factory=dict)
    written: Mapping[str, int] = field(default_factory=dict)
    flops: int = 0
    special: int = 0
    mainloop_flops: int = 0
    registers: float = 0.0

    @property
    def bytes_read(self) -> int:
        return sum(self.read.values())

    @property
    def bytes_written(self) -> int:
        return sum(self.written.values())


def traffic(
    program: Program,
    m: int,
    n: int,
    k: int = 0,
    *,
    operand_bytes: int = 2,
    compute_bytes: int = 4,
    tile: tuple[int, int] = (128, 128),
) -> Traffic:
    """Cost of ``program`` on an M x N accumulator of a (M, K) and b (K, N).

    Args:
        operand_bytes: size of an element of a, b, tile operands and default stores.
        compute_bytes: size of an element of the accumulator, vectors and partials.
        tile: of the output, for the number of partials; widened to the program's granule.
    """
    assert n % program.granule == 0, f"N = {n} is no multiple of {program.granule}"
    sizes = _Sizes(m, n, operand_bytes, compute_bytes)
    read = {"a": m * k * operand_bytes, "b": k * n * operand_bytes} if program.has_acc else {}
    for operand in program.operands:
        read[operand.name] = _operand_bytes(program, operand.name, operand.type, sizes)
    flops, special = _work(program, sizes)
    return Traffic(
        read=read,
        written=_written(program, sizes, tile),
        flops=flops,
        special=special,
        mainloop_flops=2 * m * n * k if program.has_acc else 0,
        registers=float(peak_registers(program)) * compute_bytes / 4,
    )


@dataclass(frozen=True)
class _Sizes:
    m: int
    n: int
    operand_bytes: int
    compute_bytes: int

    @property
    def tile_bytes(self) -> int:
        return max(self.operand_bytes, _NARROWEST)

    def elements(self, type_: Type) -> int:
        rows = self.m if type_.has_rows else 1
        return rows * (int(type_.cols * self.n) if type_.has_cols else 1)

    def bytes_of(self, dtype: str) -> int:
        known = {"operand": self.tile_bytes, "accumulator": self.compute_bytes}
        return known[dtype] if dtype in known else BYTES[dtype]


def _operand_bytes(program: Program, name: str, type_: Type, sizes: _Sizes) -> int:
    if type_.kind is Kind.INDEX:
        return sizes.m * _INDEX_BYTES
    if type_.kind is Kind.ROTARY:  # [cos | sin] of each row, and its position
        leaf = next(i for i, x in enumerate(program.nodes) if _is_operand(x, name))
        dims = [x.attr("rotary_dim") for x in program.nodes if leaf in x.args]
        return sizes.m * (max(dims) * sizes.compute_bytes + _INDEX_BYTES)
    wide = type_.kind is Kind.TILE
    return sizes.elements(type_) * (sizes.tile_bytes if wide else sizes.compute_bytes)


def _is_operand(node: Node, name: str) -> bool:
    return node.op == "operand" and node.attr("name") == name


def _written(program: Program, sizes: _Sizes, tile: tuple[int, int]) -> dict[str, int]:
    tile_n = -(-tile[1] // program.granule) * program.granule
    tiles_m, tiles_n = -(-sizes.m // tile[0]), -(-sizes.n // tile_n)
    written = {
        o.name: sizes.elements(program.nodes[o.node].type) * sizes.bytes_of(o.dtype)
        for o in program.stores
    }
    for i, name in program.partial_names.items():
        node = program.nodes[i]
        count = sizes.elements(node.type)
        count *= 1 if node.type.has_cols else tiles_n
        count *= 1 if node.type.has_rows else tiles_m
        components = len(REDUCTION[node.op].components)
        written[name] = written.get(name, 0) + count * components * sizes.compute_bytes
    return written


def _work(program: Program, sizes: _Sizes) -> tuple[int, int]:
    flops = special = 0
    for node in program.nodes:
        if node.op not in COST:  # leaves and operands
            continue
        work = COST[node.op]
        types = [node.type, *(program.nodes[a].type for a in node.args)]
        elements = max(sizes.elements(t) for t in types if t.kind is not Kind.ROTARY)
        flops += work.flops * elements
        special += work.special * elements
    return flops, special


def peak_registers(program: Program) -> Fraction:
    """Largest number of tile values alive at once, in accumulator elements.

    Vectors are left out: a row or column value is shared by a whole row or column of a thread's
    fragment. Views (the members of a pair, a value per group) live in their source's registers.
    """
    nodes = program.nodes
    last = {o.node: o.node for o in program.outputs}  # a store takes the value where it is made
    for i in reversed(range(len(nodes))):
        last.setdefault(i, i)
        for a in nodes[i].args:
            # A view keeps its source alive as long as it lives itself.
            use = last[i] if nodes[i].op in _VIEWS else i
            last[a] = max(last.get(a, a), use)
    width = [_width(node) for node in nodes]
    peak = Fraction(0)
    for i in range(len(nodes)):
        before = sum((width[j] for j in range(i) if last[j] >= i), Fraction(0))
        after = sum((width[j] for j in range(i + 1) if last[j] > i), width[i] * (last[i] == i))
        peak = max(peak, before, after)
    return peak


def _width(node: Node) -> Fraction:
    in_registers = node.type.kind is Kind.TILE and node.op not in _VIEWS | REDUCTIONS
    return node.type.cols if in_registers and not node.type.boolean else Fraction(0)
