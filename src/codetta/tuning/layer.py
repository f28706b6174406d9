"""The GEMM kernels of a decoder layer, from attention output to the next layer's q, k and v."""

from __future__ import annotations

from dataclasses import replace

from codetta.backends.cuda.config_cache import canonical
from codetta.language.program import Program
from codetta.language.types import Kind
from codetta.nn.block import ADJACENT, MIDDLE, Spec, compiled, segment
from codetta.plan.grouping import GEMM
from codetta.plan.plan import PARAMETER
from codetta.tuning.space import Problem


def layer_problems(
    tokens: int, d: int, f: int, heads: int, kv_heads: int, operand: str = "bf16"
) -> dict[str, Problem]:
    """Kernels of the forward and the backward by name, in the order in which they run.

    Args:
        d, f: hidden size and MLP width; heads of d / heads columns.
    """
    head_dim = d // heads
    plan = segment(Spec(MIDDLE, d, f, heads, kv_heads, head_dim, head_dim), ADJACENT)
    wrt = tuple(i.name for i in plan.inputs if i.type.kind is not Kind.ROTARY)
    parts = compiled(plan, wrt, tuple(o.name for o in plan.outputs))
    found: dict[str, Problem] = {}
    for schedule in (parts.forward, parts.backward):
        assert schedule is not None
        weights = {i.name for i in schedule.plan.inputs if i.role == PARAMETER}
        for kernel in schedule.kernels:
            if kernel.kind != GEMM:
                continue
            program, nodes = kernel.program, schedule.plan.nodes
            assert program is not None
            layout = nodes[kernel.root].attr("layout")
            inner = tokens if layout == "tn" else int(nodes[kernel.reads[0]].type.cols)
            rows = tokens if kernel.rows == "M" else int(kernel.rows)
            found[program.name] = Problem(
                canonical(program), rows, kernel.cols, inner, layout, operand,
                _dtypes(program, weights, operand),
            )  # fmt: skip
    return found


def _dtypes(program: Program, weights: set[str], operand: str) -> tuple[str, ...]:
    """Row vectors that are weights have the operand's dtype, computed vectors are fp32."""
    plain = Problem(program, 1, 1, 1, operand=operand)
    named = [n for o in program.operands for n in [o.name] * (1 + (o.kind is Kind.ROTARY))]
    rows = {o.name for o in program.operands if o.kind is Kind.ROW} & weights
    return tuple(operand if n in rows else t for n, t in zip(named, plain.flat_dtypes, strict=True))


def fewer_heads(problem: Problem, at_most: int = 32) -> Problem:
    """With fewer rotated heads: one kernel for all layers, whose time is the same."""
    nodes = tuple(
        replace(
            x, attrs=tuple((n, min(v, at_most) if n == "heads" else v) for n, v in x.attrs)
        )
        if x.op == "rotate"
        else x
        for x in problem.program.nodes
    )  # fmt: skip
    return replace(problem, program=replace(problem.program, nodes=nodes))
