"""From a Program to the source of a QuACK epilogue: which form it takes, and its code.

QuACK calls a Python function per accumulator element while it traces a kernel, in one of three
forms; the widths of a program's values choose:

    element          everything as wide as the accumulator: one lane per call
    acc_pair         the accumulator comes in adjacent pairs; stores are full (one) or half as wide
    packed_cd_b16x2  the accumulator is half as wide as one loaded and one stored 16-bit matrix

What a program loads becomes parameters (:class:`Load`), what it reduces becomes sinks
(:class:`Sink`), one of its stores becomes D and the others auxiliary stores. The result is the text
of a complete Python module. Text, because QuACK keys its kernel cache by the source of the function
and of what the function refers to: a closure or a table of lambdas would give two programs one key
(quack-kernels 0.6.5 hashes ``co_code`` where there is no source, and that ignores attribute names).
Names in the text are numbers, so equal computations of several programs share one kernel; messages
say the program's own names.

Tiles that reach over the edge of the matrix run the function on zeros, except for values that do
not extend over that axis. A sum must not see what comes out: where an extent is no multiple of the
tile (``ragged``), sums are taken of ``valid ? x : 0`` with a vector of ones that is zero outside,
unless the sum's argument provably vanishes there. Maxima, log-sum-exp and moments mask by
coordinate themselves.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from codetta.backends.cuda import sinks
from codetta.backends.cuda.forms import (
    CUTLASS,
    ELEMENT,
    HALF,
    PACKED,
    PAIR,
    STATES,
    UNIT,
    Load,
    Lowered,
    Partials,
    Sink,
    storage,
)
from codetta.backends.cuda.rules import LOWERING, Lanes, NotLowerable, is_number, refuse_split
from codetta.backends.cuda.source import module_source
from codetta.backends.cuda.vanishing import vanishes
from codetta.language.program import Operand, Output, Program
from codetta.language.types import Kind, Type
from codetta.language.values import Node


@lru_cache(maxsize=1024)
def lower(
    program: Program,
    operand: str,
    ragged: frozenset[str] = frozenset(),
    *,
    vectorize: bool = True,
) -> Lowered:
    """The epilogue of a program whose a and b are ``operand`` ('bf16', 'fp16' or 'fp8').

    Args:
        ragged: 'n' and 'm' where that extent may be no multiple of the tile.
        vectorize: False keeps the compiler from packing pairs on Blackwell, where that can crash.

    Raises:
        NotLowerable: with the reason.
    """
    return _Lowering(program, operand, ragged, vectorize).lowered()


def mode_of(program: Program) -> str:
    """The form that fits the widths of the values the kernel computes."""
    widths, paired = {Fraction(1)}, False
    for i in _inside(program):
        node = program.nodes[i]
        if node.op in ("group_sum", "ungroup", "unpack", "pack", "rotate"):
            refuse_split(node)
        if node.type.kind in (Kind.TILE, Kind.ROW):
            widths.add(node.type.cols)
        paired |= node.op in ("unpack", "pack", "rotate")
    if widths == {Fraction(1)}:
        return PAIR if paired else ELEMENT
    if widths <= {Fraction(1), Fraction(1, 2)}:
        return PAIR
    if widths <= {Fraction(1), Fraction(2)}:
        return PACKED
    raise NotLowerable(f"values of widths {', '.join(map(str, sorted(widths)))} in one tile")


def _inside(program: Program) -> list[int]:
    """Nodes the kernel computes, reductions included; what follows a reduction is left out."""
    roots = [o.node for o in program.stores]
    roots += [a for i in program.reductions for a in program.nodes[i].args]
    found = set(program.reductions).union(*(program.reachable(r) for r in roots))
    return sorted(found)


class _Lowering:
    """One pass over the nodes; see :class:`codetta.backends.cuda.rules.Emitter`."""

    def __init__(
        self, program: Program, operand: str, ragged: frozenset[str], vectorize: bool
    ) -> None:
        self.program, self.operand, self.ragged = program, operand, ragged
        self.vectorize = vectorize
        self.mode = mode_of(program)
        self.loads: dict[str, Load] = {}
        self.sinks: dict[str, Sink] = {}
        self.sink_names: dict[str, str] = {}  # by what they reduce
        self.partials: list[Partials] = []
        self.lines: list[str] = []
        self.returned: dict[str, str] = {}
        self.numbers = {o.name: i for i, o in enumerate(program.operands)}
        self.lanes: dict[int, Lanes] = {}
        tiles = [o for o in program.operands if o.kind is Kind.TILE and self._used(o)]
        wide = [o for o in tiles if o.width == 2]
        self.c = (wide if self.mode == PACKED else tiles)[:1]

    def _used(self, operand: Operand) -> bool:
        return any(
            self.program.nodes[i].op == "operand"
            and self.program.nodes[i].attr("name") == operand.name
            for i in _inside(self.program)
        )

    def lowered(self) -> Lowered:
        d, aux = self._stores()
        for i in _inside(self.program):
            self._node(i, self.program.nodes[i])
        if d is not None:
            self.returned["D"] = self._stored(self.lanes[d.node])
        for name, out in aux:
            self.returned[name] = self._stored(self.lanes[out.node])
        self.ragged = self._edges()
        return Lowered(
            self.program, self.operand, self._source(aux), self.mode, tuple(self.loads.values()),
            tuple(self.sinks.values()), tuple(self.partials), d, tuple(aux), self.ragged,
        )  # fmt: skip

    def _edges(self) -> frozenset[str]:
        """Axes whose edges this code treats; the same program without is the same kernel."""
        masked = {x.port.removeprefix("valid_") for x in self.loads.values()}
        states = any(s.fold in STATES for s in self.sinks.values())
        return self.ragged & (masked | ({"n"} if states else set()))

    # ---- stores
    def _stores(self) -> tuple[Output | None, list[tuple[str, Output]]]:
        stores = list(self.program.stores)
        for out in stores:
            storage(out.dtype, self.operand)
        full = Fraction(2) if self.mode == PACKED else Fraction(1)
        wide = [o for o in stores if self.program.nodes[o.node].type.cols == full]
        narrow = [o for o in stores if o not in wide]
        if self.mode == PACKED:
            if len(wide) != 1 or not self.c or storage(wide[0].dtype, self.operand) not in HALF:
                raise NotLowerable(
                    "twice as wide as the accumulator there must be one matrix loaded and one "
                    "stored, in 16 bits"
                )
            if sum(o.width == 2 and o.kind is Kind.TILE for o in self.program.operands) > 1:
                raise NotLowerable("two loaded matrices twice as wide as the accumulator")
        elif self.mode == PAIR:
            if len(wide) > 1:
                raise NotLowerable("two full-width stores of a program that works on pairs")
            other = {storage(o.dtype, self.operand) for o in narrow}.difference(HALF)
            if other:
                raise NotLowerable(f"a half-width store in {min(other)}")
        d = wide[0] if wide else None
        rest = [o for o in stores if o is not d]
        return d, [(f"o{i}", o) for i, o in enumerate(rest)]

    def _stored(self, lanes: Lanes) -> str:
        values = [f"F32({x})" for x in lanes]
        return f"({', '.join(values)})" if len(values) > 1 else values[0]

    # ---- nodes
    def _node(self, i: int, node: Node) -> None:
        args = [self.lanes[a] for a in node.args if a in self.lanes]
        if node.op == "const":
            self.lanes[i] = (_literal(node.attr("value")),)
        elif node.op == "acc":
            self.lanes[i] = ("acc[0]", "acc[1]") if self.mode == PAIR else ("acc",)
        elif node.op == "extent":
            axis, width = node.attr("axis"), Fraction(node.attr("width"))
            name = f"extent_{axis}_{width.numerator}_{width.denominator}"
            self.lanes[i] = (self._load(name, "extent", detail=(axis, width)),)
        elif node.op == "operand":
            self.lanes[i] = self._operand(self.program.operand(node.attr("name")))
        else:
            self._check(node.type)
            made = LOWERING[node.op](self, i, node, args)
            self.lanes[i] = tuple(self.let(x) for x in made)

    def _check(self, type_: Type) -> None:
        if type_.has_cols and not type_.reduced:
            ratio = type_.cols / UNIT[self.mode]
            plain = {"adjacent", "expand:adjacent"}
            if ratio not in (1, 2) or not plain.issuperset(type_.path):
                raise NotLowerable(f"a value of type {type_}: its columns lie in several threads")

    def let(self, expression: str) -> str:
        if expression.isidentifier() or is_number(expression) or expression in ("acc[0]", "acc[1]"):
            return expression
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return name

    def lanes_of(self, node: int) -> int:
        type_ = self.program.nodes[node].type
        return int(type_.cols / UNIT[self.mode]) if type_.has_cols else 1

    def storage_type(self, dtype: str) -> str | None:
        name = {"fp64": "fp32"}.get(dtype) or storage(dtype, self.operand)
        return CUTLASS.get(name)

    # ---- loads
    def _load(
        self,
        name: str,
        port: str,
        operand: str = "",
        part: int = 0,
        detail: tuple[str | int | Fraction, ...] = (),
    ) -> str:
        self.loads[name] = Load(name, port, operand, part, detail)
        return name

    def _pair(self, name: str) -> Lanes:
        return (f"{name}[0]", f"{name}[1]")

    def _operand(self, o: Operand) -> Lanes:
        self._check(o.type)
        name = f"p{self.numbers[o.name]}"
        if o.kind is Kind.TILE:
            if o in self.c:
                lanes = self._load("c", "c", o.name)
                full = o.width == (2 if self.mode == PACKED else 1)
                paired = self.mode != ELEMENT
            else:
                lanes, full = self._load(name, "tile", o.name), o.width == 1
                paired = self.mode == PAIR
            if not full:
                raise NotLowerable(f"operand {o.name!r}: a loaded matrix narrower than D")
            return self._pair(lanes) if paired else (lanes,)
        if o.kind is Kind.ROW:
            return self._row(o, name)
        if o.kind is Kind.COL:
            return (self._load(name, "col", o.name),)
        if o.kind is Kind.SCALAR:
            return (self._load(name, "scalar", o.name),)
        return ()  # indices and rotary tables have lanes only where they are used

    def _row(self, o: Operand, name: str) -> Lanes:
        if self.mode == PACKED and o.width == 2:
            return tuple(self._load(f"{name}_{i}", "row", o.name, part=i) for i in (0, 1))
        self._load(name, "row", o.name)
        if self.mode != PAIR:
            return (name,)
        return self._pair(name) if o.width == 1 else (f"{name}[0]",)  # a half row comes repeated

    def _source_of(self, number: int, argument: int) -> str:
        return str(self.program.nodes[self.program.nodes[number].args[argument]].attr("name"))

    def rotary(self, number: int) -> tuple[str, str, str | None]:
        if self.mode != PAIR:
            raise NotLowerable("rotate beside values twice as wide as the accumulator")
        node = self.program.nodes[number]
        head_dim, rotary_dim, heads = (node.attr(k) for k in ("head_dim", "rotary_dim", "heads"))
        source = self._source_of(number, 1)
        table = f"rope{self.numbers[source]}_{head_dim}_{rotary_dim}"
        self._load(table, "rotary", source, detail=(head_dim, rotary_dim))
        turns = None
        if heads >= 0 or rotary_dim < head_dim:
            turns = self._load(
                f"turns_{head_dim}_{rotary_dim}_{max(heads, 0)}", "turns",
                detail=(head_dim, rotary_dim, heads),
            ) + "[0]"  # fmt: skip
        return f"{table}[0]", f"{table}[1]", turns

    def onehot(self, number: int) -> Lanes:
        index = self._source_of(number, 0)
        name = self._load(f"hit{self.numbers[index]}", "onehot", index)
        self._check(self.program.nodes[number].type)
        if self.lanes_of(number) != (2 if self.mode == PAIR else 1):
            raise NotLowerable("onehot of another width than the accumulator")
        return self._pair(name) if self.mode == PAIR else (name,)

    # ---- reductions
    def reduce(self, number: int, args: list[Lanes]) -> None:
        sinks.reduce(self, number, args)

    def sink(
        self, key: str, fold: str, over: str, value: str, *, scaled: bool = False, operand: str = ""
    ) -> str:
        name = self.sink_name(key)
        index = f"index{self.numbers[operand]}" if operand else ""
        self.sinks[name] = Sink(name, fold, over, scaled, operand, index)
        self.returned[name] = value
        return name

    def sink_name(self, key: str) -> str:
        return self.sink_names.setdefault(key, f"s{len(self.sink_names)}")

    def masked(self, lanes: Lanes, over: str, node: int) -> Lanes:
        """The lanes, zero outside of the matrix along the reduced axis where that is ragged."""
        if over not in self.ragged or vanishes(self.program, node, over):
            return lanes
        name = self._load(f"valid_{over}", f"valid_{over}")
        pair = self.mode == PAIR and over == "n"
        return tuple(
            self.let(
                f"F32(cutlass.select_({name}{f'[{i}]' if pair else ''} > 0.5, F32({x}), F32(0.0)))"
            )
            for i, x in enumerate(lanes)
        )

    def _source(self, aux: list[tuple[str, Output]]) -> str:
        return module_source(
            operand=self.operand,
            mode=self.mode,
            ragged=self.ragged,
            loads=list(self.loads.values()),
            sinks=list(self.sinks.values()),
            aux=[name for name, _ in aux],
            lines=self.lines,
            returned=self.returned,
            vectorize=self.vectorize,
        )


def _literal(value: float) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        return f"F32(float('{value}'))"
    return repr(float(value))
