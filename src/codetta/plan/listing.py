"""What a Schedule looks like to a reader: kernels in order, with their programs as formulas.

Names: inputs and outputs keep theirs; other values are called by what they are and their node's
number: w7 depends on parameters only, r7 has a value per row, c7 one per column, v7 is a matrix.
"""

from __future__ import annotations

import textwrap

from codetta.language.program import Program
from codetta.language.types import Kind
from codetta.plan.formulas import Formulas
from codetta.plan.grouping import GEMM
from codetta.plan.kernels import Kernel
from codetta.plan.operations import size
from codetta.plan.plan import Plan
from codetta.plan.schedule import Schedule

WIDTH = 96
_INDENT = "    "
_LETTER = {Kind.COL: "r", Kind.ROW: "c", Kind.SCALAR: "s"}


def format_schedule(schedule: Schedule) -> str:
    """One paragraph per kernel: what it is and writes, and the formulas of what it computes."""
    listing = Listing(schedule.plan)
    count = sum(k.kind != "view" for k in schedule.kernels)
    lines = [f"schedule of {schedule.plan.name}: {count} kernels"]
    for kernel in schedule.kernels:
        lines += listing.paragraph(kernel)
    return "\n".join(lines)


class Listing:
    """Names, headings and formulas of a Plan's kernels."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.outputs: dict[int, str] = {}
        for out in plan.outputs:
            self.outputs.setdefault(out.node, out.name)

    def name(self, r: int) -> str:
        """Display name of a reference."""
        i = r if r >= 0 else ~r
        node = self.plan.nodes[i]
        if node.op == "operand":
            return str(node.attr("name"))
        if i in self.outputs:
            return self.outputs[i]
        letter = "w" if self.plan.parameter_only[i] else _LETTER.get(node.type.kind, "v")
        return f"{letter}{i}"

    def paragraph(self, kernel: Kernel) -> list[str]:
        heading = f"{kernel.kind} {self.contraction(kernel)}".strip()
        written = ", ".join(self.written(w) for w in kernel.writes)
        if len(heading) + len(written) + 4 <= WIDTH:
            lines = [f"{heading} -> {written}"]
        else:
            lines = [heading, *_wrapped("  -> ", written)]
        for name, formula in self.formulas(kernel):
            formula = "its partials combined" if name == formula else formula
            lines += _wrapped(f"{_INDENT}{name} = ", formula)
        return lines

    def contraction(self, kernel: Kernel) -> str:
        if kernel.kind != GEMM:
            return ""
        a, b = (self.name(r) for r in kernel.reads[:2])
        layout = self.plan.nodes[kernel.root].attr("layout")
        return {"nt": f"{a} @ {b}.t()", "nn": f"{a} @ {b}", "tn": f"{a}.t() @ {b}"}[layout]

    def written(self, w: int) -> str:
        text = f"{self.name(w)} {size(self.plan.nodes[w if w >= 0 else ~w].type)}"
        return text if w >= 0 else f"partials of {text}"

    def formulas(self, kernel: Kernel) -> list[tuple[str, str]]:
        if kernel.program is not None:
            return self.of_program(kernel, kernel.program)
        if kernel.plan is not None:
            part = kernel.plan
            names = {i.name: self.name(r) for i, r in zip(part.inputs, kernel.reads, strict=True)}
            results = [(part.outputs[0].node, self.name(kernel.root))]
            leaves = [names.get(str(dict(n.attrs).get("name"))) for n in part.nodes]
            return Formulas(part.nodes, results, leaves.__getitem__).lines
        nodes = self.plan.nodes
        found = [self.name(i) if i != kernel.root else None for i in range(len(nodes))]
        return Formulas(nodes, [(kernel.root, self.name(kernel.root))], found.__getitem__).lines

    def of_program(self, kernel: Kernel, program: Program) -> list[tuple[str, str]]:
        reads = kernel.reads[2:] if kernel.kind == GEMM else kernel.reads
        names = {o.name: self.name(r) for o, r in zip(program.operands, reads, strict=True)}
        leaves: list[str | None] = []
        for node in program.nodes:
            if node.op == "operand":
                leaves.append(names[node.attr("name")])
            elif node.op == "combine":  # the completed reduction goes by its partials' name
                leaves.append(leaves[node.args[0]])
            else:
                leaves.append("acc" if node.op == "acc" else None)
        written = zip(program.outputs, kernel.writes, strict=True)
        results = [(out.node, self.name(w)) for out, w in written]
        return Formulas(program.nodes, results, leaves.__getitem__).lines


def _wrapped(first: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=_INDENT * 2, break_long_words=False
    )
