"""From placed Plan nodes to kernels: each group's Program, operands and outputs.

Widths, absolute in a Plan, become multiples of the kernel's N; the values a kernel loads become
operands named after the Plan (inputs keep their names, others are ``v<node>``); reductions leave as
raw partials and enter finalizers as ``Partial`` operands, one per component.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from codetta.errors import PlanShape
from codetta.language.primitives import REDUCTION
from codetta.language.program import Operand, Output, Program
from codetta.language.trace import ProgramTracer
from codetta.language.types import Dim, Kind, Type, default_path
from codetta.language.values import Node, Value, attrs_of
from codetta.plan.grouping import FINALIZE, GEMM, POINTWISE, PREPARE, Group
from codetta.plan.placement import Placement
from codetta.plan.plan import PARAMETER, Input, Plan, PlanOutput, make_plan


@dataclass(frozen=True)
class Kernel:
    """One kernel (or, for views, one piece of bookkeeping).

    Attributes:
        kind: 'gemm', 'pointwise', 'finalize', 'prepare', 'move', 'view' or 'opaque'.
        root: number of the Plan node it stands for (the contraction, for a GEMM).
        program: the epilogue, pointwise or row program; None for the other kinds.
        plan: the part of the Plan a 'prepare' kernel evaluates.
        reads: references read, in the order of the program's operands (a GEMM's a and b first). A
            reference is a Plan node's number, or ``~number`` for the raw partials of a reduction.
        writes: references written, in the order of the program's outputs.
        rows, cols: M ("M" for tokens) and N of what the program computes over.
    """

    kind: str
    root: int
    program: Program | None
    plan: Plan | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    rows: Dim = 1
    cols: int = 1


def emit(placement: Placement, group: Group) -> Kernel:
    """The kernel of a group."""
    if group.kind in (GEMM, POINTWISE):
        return _Tiles(placement, group).kernel()
    if group.kind == FINALIZE:
        return _Rows(placement, group).kernel()
    if group.kind == PREPARE:
        return _prepare(placement, group)
    return Kernel(
        group.kind, group.root, None, None, placement.nodes[group.root].args, group.members
    )


def value_name(plan: Plan, i: int) -> str:
    """Display and operand name of a Plan value."""
    node = plan.nodes[i]
    return str(node.attr("name")) if node.op == "operand" else f"v{i}"


def vector_dtype(plan: Plan, i: int) -> str:
    """Storage dtype of a finalized vector: a parameter's gradient is rounded to the parameter's.

    What later kernels read stays in the accumulator's dtype.
    """
    named = any(o.node == i and o.name.startswith("d_") for o in plan.outputs)
    gradient = named and not plan.users[i] and plan.nodes[i].type.kind is Kind.ROW
    gradient = gradient and not plan.narrow
    return "operand" if gradient else "accumulator"


def component_names(plan: Plan, i: int) -> list[str]:
    """Operand names of the partials of reduction i."""
    parts: tuple[str, ...] = REDUCTION[plan.nodes[i].op].components
    return [f"v{i}_{c}" for c in parts] if len(parts) > 1 else [f"v{i}"]


class _Emitter:
    """Shared between tile and row programs: recursion over Plan nodes into a tracer."""

    def __init__(self, placement: Placement, group: Group) -> None:
        self.placement, self.group, self.plan = placement, group, placement.plan
        self.tracer = ProgramTracer(f"{self.plan.name}_{group.kind}_{group.root}")
        self.operands: dict[str, Operand] = {}
        self.reads: dict[str, int] = {}
        self.done: dict[int, Value] = {}
        rows = group.kind == FINALIZE
        over = placement.axis(group.root) if rows else placement.domain(group.root)
        self.rows: Dim = over.rows if over.has_rows else 1
        self.n = over.cols if over.has_cols else Fraction(1)

    def declare(self, operand: Operand, i: int) -> Value:
        self.operands[operand.name] = operand
        self.reads[operand.name] = i
        return self.tracer.operand(operand)

    def constant(self, node: Node) -> Value | None:
        if node.op == "const":
            return self.tracer.append(node)
        if node.op == "extent":
            if node.attr("axis") == "m":
                return self.tracer.append(node)
            return self.tracer.const(float(node.attr("width")))  # a Plan knows its sizes
        return None

    def kernel(self) -> Kernel:
        outputs = [self.output(i) for i in self.group.members]
        program = Program.build(
            self.tracer.name,
            list(self.operands.values()),
            self.tracer.nodes,
            outputs,
            allow_unused=True,
        )
        if self.n % program.granule:
            raise PlanShape(
                op=program.name,
                plan=self.plan.name,
                given=f"{self.n} columns",
                reason=f"its pairs and groups need a multiple of {program.granule}",
            )
        reads = [self.reads[o.name] for o in program.operands]
        if self.group.kind == GEMM:
            reads = [*self.plan.nodes[self.group.root].args, *reads]
        writes = tuple(self.written(i) for i in self.group.members)
        kind, root = self.group.kind, self.group.root
        return Kernel(kind, root, program, None, tuple(reads), writes, self.rows, int(self.n))

    def written(self, i: int) -> int:
        """Reference under which value i leaves this kernel."""
        return i

    def output(self, i: int) -> Output:
        raise NotImplementedError


class _Tiles(_Emitter):
    """A GEMM's epilogue, or a pointwise kernel, whose N is that of its widest matrix."""

    def __init__(self, placement: Placement, group: Group) -> None:
        super().__init__(placement, group)
        self.gemm = group.root if group.kind == GEMM else None
        inside = frozenset().union(*(self._inside(i) for i in group.members))
        self.pairs = self._pairs(inside)
        if self.gemm is None:
            used = inside.union(*(self.plan.nodes[i].args for i in inside))
            self.n = max(self.plan.nodes[i].type.cols for i in used if placement.is_tile(i))

    def _pairs(self, inside: frozenset[int]) -> str:
        """The pair layout used in this kernel, for loads of another width."""
        nodes = (self.plan.nodes[i] for i in inside)
        found = {str(n.attr("pairs")) for n in nodes if n.op in ("unpack", "pack")}
        return found.pop() if len(found) == 1 else "adjacent"

    def _inside(self, i: int) -> frozenset[int]:
        """Nodes computed in this kernel on the way to member i."""
        found, stack = {i}, [i]
        while stack:
            for a in self.plan.nodes[stack.pop()].args:
                if a not in found and self._here(a):
                    found.add(a)
                    stack.append(a)
        return frozenset(found)

    def _here(self, i: int) -> bool:
        own = i in self.group.members or self.placement.host.get(i, -1) == self.gemm
        return own or self.placement.recomputed(i)

    def output(self, i: int) -> Output:
        value = self.value(i)
        reduced = self.placement.is_reduction(i)
        return Output(f"v{i}", value.id, "accumulator" if reduced else self.plan.storage(i))

    def written(self, i: int) -> int:
        return ~i if self.placement.is_reduction(i) else i

    def value(self, i: int) -> Value:
        if i not in self.done:
            self.done[i] = self._value(i)
        return self.done[i]

    def _value(self, i: int) -> Value:
        node = self.plan.nodes[i]
        if i == self.gemm:
            return self.tracer.acc()
        constant = self.constant(node)
        if constant is not None:
            return constant
        if self._here(i):
            args = [self.value(a) for a in node.args]
            return self.tracer.emit(node.op, *args, **self._attrs(node))
        return self.declare(self._operand(i, node.type), i)

    def _operand(self, i: int, type_: Type) -> Operand:
        wide = type_.kind in (Kind.TILE, Kind.ROW)
        width = type_.cols / self.n if wide else Fraction(1)
        name, paired = value_name(self.plan, i), width in (Fraction(1, 2), 2)
        return Operand(name, type_.kind, width, self.pairs if paired else "adjacent")

    def _attrs(self, node: Node) -> dict[str, Any]:
        attrs = dict(attrs_of(node))
        if node.op in ("broadcast", "onehot"):
            width = Fraction(str(attrs["width"])) / self.n
            attrs["width"] = int(width) if width.denominator == 1 else width
            attrs["path"] = "/".join(default_path(width, self.pairs))
            attrs.pop("rows", None)
        return attrs


class _Rows(_Emitter):
    """A finalizer: arithmetic per row (or column) on completed reductions."""

    def output(self, i: int) -> Output:
        return Output(f"v{i}", self.value(i).id, vector_dtype(self.plan, i))

    def value(self, i: int) -> Value:
        if i not in self.done:
            self.done[i] = self._value(i)
        return self.done[i]

    def _value(self, i: int) -> Value:
        node = self.plan.nodes[i]
        constant = self.constant(node)
        if constant is not None:
            return constant
        if self.placement.is_reduction(i):
            return self._combined(i, node)
        here = i in self.group.members or i not in self.placement.stored
        if self.placement.is_repeated(i) or (self.placement.is_vector(i) and here):
            args = [self.value(a) for a in node.args]
            return self.tracer.emit(node.op, *args, **self._attrs(node))
        return self.declare(Operand(value_name(self.plan, i), node.type.kind), i)

    def _combined(self, i: int, node: Node) -> Value:
        parts = [
            self.declare(Operand(name, Kind.PARTIAL), ~i) for name in component_names(self.plan, i)
        ]
        return self.tracer.emit("combine", *parts, reduction=node.op, width=1, path="")

    def _attrs(self, node: Node) -> dict[str, Any]:
        attrs = dict(attrs_of(node))
        if node.op == "broadcast":
            attrs |= {"width": 1, "path": ""}
            attrs.pop("rows", None)
        return attrs


def _prepare(placement: Placement, group: Group) -> Kernel:
    """The part of the Plan between stored values and one prepared weight."""
    plan = placement.plan
    reads = sorted(placement.prepared_reads(group.root, placement.stored))
    nodes: list[Node] = []
    number: dict[int, int] = {}
    inputs = []
    for i in range(group.root + 1):
        node = plan.nodes[i]
        if i in reads:
            name = value_name(plan, i)
            narrow = plan.narrow if plan.storage(i) == "accumulator" else ""
            inputs.append(Input(name, node.type, PARAMETER, narrow))
            node = Node("operand", (), (("name", name),), node.type)
        elif not all(a in number for a in node.args):
            continue
        number[i] = len(nodes)
        nodes.append(Node(node.op, tuple(number[a] for a in node.args), node.attrs, node.type))
    part = make_plan(
        f"{plan.name}_prepare_{group.root}",
        inputs,
        nodes,
        [PlanOutput(f"v{group.root}", number[group.root])],
    )
    by_name = {value_name(plan, i): i for i in reads}
    found = tuple(by_name[i.name] for i in part.inputs)
    return Kernel(group.kind, group.root, None, part, found, group.members)
