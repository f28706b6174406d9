"""The derivative of a Program, as Programs.

``vjp(program, wrt)`` returns the pointwise part of the backward: given the cotangents of the
outputs it computes ``d_acc`` (which then feeds dgrad and wgrad) and the gradients of the operands.
It is reverse mode over the expression graph with the DERIVATIVE table, in three steps:

1. *Adjoint.* Forward values a rule asks for are rebuilt from what is at hand: operands, stored
   outputs (``saved_<name>``), and only if nothing else will do the accumulator (``saved_acc``,
   which the forward then stores in a's dtype, as PyTorch would store the matmul's result).
2. *Reduce.* A cotangent over more axes than its argument is summed over them.
3. *Stage.* A reduction whose result is needed inside a tile splits the work: it becomes a final of
   one pass and an operand of the next. Most programs need one pass; the maximum, whose gradient is
   shared by ties, needs two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from codetta.language.derivatives import broadcast_like
from codetta.language.primitives import DERIVATIVE, REDUCTIONS
from codetta.language.program import Operand, Output, Program
from codetta.language.trace import ProgramTracer
from codetta.language.types import Kind, Type
from codetta.language.values import Node, Value, attrs_of

ACC = "acc"
#: Operations whose result does not have the union of their arguments' axes and widths.
_STRUCTURAL = REDUCTIONS | {"unpack", "pack", "rotate", "group_sum", "ungroup", "onehot"}


@dataclass(frozen=True)
class Backward:
    """Pointwise part of a Program's backward.

    Attributes:
        forward: the differentiated program, with a ``saved_acc`` store if the backward needs it.
        passes: programs to run in order; finals of one are operands of the next.
        saved: names among the forward's outputs that the backward reads ("acc" for the
            accumulator).
        zero: names in ``wrt`` whose gradient is identically zero.
    """

    forward: Program
    passes: tuple[Program, ...]
    saved: tuple[str, ...]
    zero: tuple[str, ...]

    def __str__(self) -> str:
        """Listing: the passes, then the GEMMs that d_acc feeds."""
        lines = [str(p) for p in self.passes]
        if any(o.name == "d_acc" for p in self.passes for o in p.outputs):
            lines += ["gemm dgrad: d_a = d_acc @ b.t()", "gemm wgrad: d_b = a.t() @ d_acc"]
        return "\n".join(lines)


class AdjointTracer(ProgramTracer):
    """Reductions are ordinary values here; :func:`_staged` sorts out when they are known."""

    def typed(self, result: Type) -> Type:
        return result.but(reduced=False)


def vjp(
    program: Program,
    wrt: Iterable[str],
    *,
    cotangents: Iterable[str] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> Backward:
    """Programs that map cotangents ``d_<output>`` to gradients ``d_acc`` and ``d_<operand>``.

    Args:
        program: the forward.
        wrt: "acc" and names of operands.
        cotangents: outputs with a nonzero cotangent; all by default.
        dtypes: storage dtype of a gradient by operand name; default 'operand' for tiles and acc,
            'accumulator' for vectors and scalars.
    """
    wrt = tuple(wrt)
    active = tuple(cotangents) if cotangents is not None else tuple(o.name for o in program.outputs)
    adjoint = _Adjoint(program, frozenset(wrt), active)
    gradients = adjoint.gradients()
    outputs = []
    for name in wrt:
        value = gradients.get(name)
        if value is None:
            continue
        wide = value.type.kind is Kind.TILE
        dtype = (dtypes or {}).get(name, "operand" if wide else "accumulator")
        outputs.append(Output(f"d_{name}", value.id, dtype))
    passes = _staged(program, adjoint, outputs)
    read = {o.name for p in passes for o in p.operands}
    saved = tuple(n for n in (ACC, *(o.name for o in program.outputs)) if f"saved_{n}" in read)
    forward = with_saved_acc(program) if ACC in saved else program
    return Backward(forward, passes, saved, tuple(n for n in wrt if n not in gradients))


def with_saved_acc(program: Program) -> Program:
    """The program with its accumulator stored as ``saved_acc`` in a's dtype."""
    nodes = list(program.nodes)
    acc = next((i for i, n in enumerate(nodes) if n.op == ACC), len(nodes))
    if acc == len(nodes):
        nodes.append(Node(ACC, (), (), Type(Kind.TILE)))
    outputs = [*program.outputs, Output("saved_acc", acc, "operand")]
    return Program.build(program.name, program.operands, nodes, outputs)


class _Adjoint:
    """Reverse sweep over a program's nodes."""

    def __init__(self, program: Program, wrt: frozenset[str], active: tuple[str, ...]) -> None:
        self.program = program
        self.tracer = AdjointTracer(f"{program.name}_backward")
        self.operands: dict[str, Operand] = {o.name: o for o in program.operands}
        self.active = active
        self.forward: dict[int, Value] = {}
        self.wanted = self._depends_on(wrt)
        self.wrt = wrt
        # What the forward leaves behind in full precision of its dtype can be read back.
        self.stored = {
            o.node: o.name for o in program.outputs if o.dtype in ("operand", "accumulator")
        }

    def _depends_on(self, wrt: frozenset[str]) -> list[bool]:
        wanted: list[bool] = []
        for node in self.program.nodes:
            name = ACC if node.op == ACC else node.attr("name") if node.op == "operand" else None
            leaf = name in wrt
            wanted.append(leaf or any(wanted[a] for a in node.args))
        return wanted

    def leaf(self, name: str, type_: Type) -> Value:
        """An operand of the backward that is not one of the forward."""
        if name not in self.operands:
            self.operands[name] = _operand(name, type_)
        return self.tracer.leaf("operand", type_.but(reduced=False), name=name)

    def value(self, i: int) -> Value:
        """Forward value of node i, from saved outputs and operands where possible."""
        if i not in self.forward:
            node = self.program.nodes[i]
            if node.op == "operand" or (not node.args and node.op != ACC):
                made = self.tracer.append(node)
            elif i in self.stored:
                made = self.leaf(f"saved_{self.stored[i]}", node.type)
            elif node.op == ACC:
                made = self.leaf("saved_acc", node.type)
            else:
                args = [self.value(a) for a in node.args]
                made = self.tracer.emit(node.op, *args, **attrs_of(node))
            self.forward[i] = made
        return self.forward[i]

    def gradients(self) -> dict[str, Value]:
        """Cotangents of "acc" and of the operands in wrt, by name."""
        cotangent: dict[int, Value] = {}
        for out in self.program.outputs:
            if out.name in self.active and self.wanted[out.node]:
                seed = self.leaf(f"d_{out.name}", self.program.nodes[out.node].type)
                _accumulate(cotangent, out.node, seed)
        found: dict[str, Value] = {}
        for i in reversed(range(len(self.program.nodes))):
            if i not in cotangent or not self.wanted[i]:
                continue
            node, d = self.program.nodes[i], cotangent[i]
            if node.op == ACC:
                found[ACC] = broadcast_like(d, self.value(i))
            elif node.op == "operand":
                found[node.attr("name")] = broadcast_like(d, self.value(i))
            else:
                self._propagate(node, i, d, cotangent)
        return found

    def _propagate(self, node: Node, i: int, d: Value, cotangent: dict[int, Value]) -> None:
        y = self.value(i)
        args = [self.value(a) for a in node.args]
        cotangents = DERIVATIVE[node.op](d, y, attrs_of(node), *args)
        for a, x, g in zip(node.args, args, cotangents, strict=True):
            if g is not None and self.wanted[a]:
                if node.op not in _STRUCTURAL and _thinner(x, y):
                    g = broadcast_like(g, y)
                _accumulate(cotangent, a, sum_to(g, x))


def _accumulate(cotangent: dict[int, Value], i: int, g: Value) -> None:
    cotangent[i] = cotangent[i] + g if i in cotangent else g


def _thinner(x: Value, y: Value) -> bool:
    return (y.type.has_rows and not x.type.has_rows) or (y.type.has_cols and not x.type.has_cols)


def sum_to(g: Value, x: Value) -> Value:
    """g summed over the axes that x lacks."""
    over_rows = g.type.has_rows and not x.type.has_rows
    over_cols = g.type.has_cols and not x.type.has_cols
    if over_rows and over_cols:
        return g.tracer.emit("totalsum", g)
    if over_rows:
        return g.tracer.emit("colsum", g)
    return g.tracer.emit("rowsum", g) if over_cols else g


def _operand(name: str, type_: Type) -> Operand:
    """Declaration of an operand of a derived program with this type."""
    last = type_.path[-1] if type_.path else ""
    pairs = last.removeprefix("expand:") if last and not last.startswith("group:") else "adjacent"
    width = type_.cols if type_.has_cols else Fraction(1)
    return Operand(name, type_.kind, width, pairs)


# --------------------------------------------------------------------------------- staging
def _staged(program: Program, adjoint: _Adjoint, outputs: list[Output]) -> tuple[Program, ...]:
    nodes = adjoint.tracer.nodes
    stage, crossing = _stages(nodes, _live(nodes, [o.node for o in outputs]))
    count = 1 + max((stage[o.node] for o in outputs), default=-1)
    passes = (
        _Pass(adjoint, stage, crossing, s).program(
            f"{program.name}_backward" + (f"_{s}" if count > 1 else ""), outputs
        )
        for s in range(count)
    )
    return tuple(p for p in passes if p is not None)


class _Pass:
    """One pass: emits the nodes of the adjoint that belong to stage ``number``."""

    def __init__(
        self, adjoint: _Adjoint, stage: dict[int, int], crossing: set[int], number: int
    ) -> None:
        self.nodes, self.stage, self.crossing = adjoint.tracer.nodes, stage, crossing
        self.number = number
        self.tracer = ProgramTracer(adjoint.tracer.name)
        self.operands = dict(adjoint.operands)
        self.emitted: dict[int, Value] = {}

    def program(self, name: str, outputs: list[Output]) -> Program | None:
        made = [
            Output(o.name, self.emit(o.node).id, o.dtype)
            for o in outputs
            if self.stage[o.node] == self.number
        ]
        made += [
            Output(_crossing_name(i), self.emit(i).id, "accumulator")
            for i in sorted(self.crossing)
            if self.stage[i] == self.number
        ]
        if not made:
            return None
        operands = list(self.operands.values())
        return Program.build(name, operands, self.tracer.nodes, made, allow_unused=True)

    def emit(self, i: int) -> Value:
        """Node i in this pass: read if an earlier pass reduced it, else computed (again)."""
        if i not in self.emitted:
            node = self.nodes[i]
            if i in self.crossing and self.stage[i] < self.number:
                operand = _operand(_crossing_name(i), node.type)
                self.operands[operand.name] = operand
                self.emitted[i] = self.tracer.operand(operand)
            elif not node.args:
                self.emitted[i] = self.tracer.append(node)
            else:
                args = [self.emit(a) for a in node.args]
                self.emitted[i] = self.tracer.emit(node.op, *args, **attrs_of(node))
        return self.emitted[i]


def _crossing_name(i: int) -> str:
    """Name of a reduced value that one pass leaves for the next."""
    return f"saved_pass{i}"


def _live(nodes: list[Node], roots: list[int]) -> list[int]:
    seen, stack = set(roots), list(roots)
    while stack:
        for a in nodes[stack.pop()].args:
            if a not in seen:
                seen.add(a)
                stack.append(a)
    return sorted(seen)


def _stages(nodes: list[Node], live: list[int]) -> tuple[dict[int, int], set[int]]:
    """The pass in which each node is known, and the reduced values that a later pass must read."""
    stage: dict[int, int] = {}
    reduced: dict[int, bool] = {}  # known only after all tiles
    crossing: set[int] = set()
    for i in live:
        node = nodes[i]
        known = [a for a in node.args if reduced[a]]
        in_tile = node.op in REDUCTIONS or node.type.kind is Kind.TILE or node.op == "broadcast"
        if known and in_tile:
            crossing.update(known)
            stage[i] = max(stage[a] + reduced[a] for a in node.args)
        else:
            stage[i] = max((stage[a] for a in node.args), default=0)
        reduced[i] = node.op in REDUCTIONS or (bool(known) and not in_tile)
    return stage, crossing
