"""What a call must return: the program in fp64, differentiated by torch and not by codetta.

``run`` executes the same program on whole matrices in a dtype of one's choice. In fp64 that is the
oracle; in the dtype under test, every operation rounded, it is what eager PyTorch would give.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from codetta.backends.reference import execute
from codetta.language.meaning import Context
from codetta.language.program import Output, Program
from codetta.language.types import Kind
from codetta.language.values import Node


@dataclass
class Run:
    """Outputs by name, gradients by name ("a", "b", operands)."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def run(program, a, b, operands, dtype, cotangents=None, compute=None) -> Run:
    """Execute in ``dtype``; with cotangents (by output name) also torch's gradients.

    ``compute`` is the dtype of the arithmetic, by default ``dtype``: each operation rounds.
    """
    leaves = {"a": _leaf(a, dtype), "b": _leaf(b, dtype)}
    for o in program.operands:
        if o.kind not in (Kind.INDEX, Kind.ROTARY):
            x = torch.as_tensor(operands[o.name])
            leaves[o.name] = _leaf(x, torch.promote_types(dtype, x.dtype))
    given = {**operands, **leaves}
    outputs, _ = execution(program, leaves["a"], leaves["b"], given, compute or dtype)
    if cotangents is None:
        return Run({k: v.detach() for k, v in outputs.items()}, {})
    pairs = [
        (outputs[name], d.reshape(outputs[name].shape).to(outputs[name].dtype))
        for name, d in cotangents.items()
        if outputs[name].requires_grad
    ]
    gradients = torch.autograd.grad(
        [y for y, _ in pairs], list(leaves.values()), [d for _, d in pairs], allow_unused=True
    )
    found = dict(zip(leaves, gradients, strict=True))
    zeros = {k: torch.zeros_like(leaves[k]) if v is None else v for k, v in found.items()}
    return Run({k: v.detach() for k, v in outputs.items()}, zeros)


def execution(program, a, b, operands, compute=None, tile=None):
    """Outputs and raw partials, by the executor itself; not through any operator."""
    compute = compute or torch.promote_types(torch.float32, a.dtype)
    lead = a.shape[:-1]
    canonical = {}
    for o in program.operands:
        x = operands[o.name]
        if o.kind is Kind.ROTARY:
            table, positions = x
            canonical[o.name] = table.to(compute)[positions.expand(lead).reshape(-1)]
        elif o.kind is Kind.INDEX:
            canonical[o.name] = x.reshape(-1, 1).long()
        else:
            canonical[o.name] = _two_dimensional(x, o.kind).to(compute)
    m, n = lead.numel(), b.shape[1]
    acc = a.reshape(m, a.shape[-1]).to(compute) @ b.to(compute)
    ctx = Context(m, n, a.dtype, compute, a.device)
    return execute(program, ctx, canonical, acc=acc, tile=tile)


def _leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype).clone().requires_grad_()


def _two_dimensional(x: Tensor, kind: Kind) -> Tensor:
    if kind is Kind.ROW:
        return x.reshape(1, -1)
    if kind is Kind.SCALAR:
        return x.reshape(1, 1)
    if kind is Kind.COL:
        return x.reshape(-1, 1)
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def last_addends(program, name, a, b, operands) -> Tensor:
    """Sum of the absolute addends of the last expression of an output, in fp64.

    |x| + |y| for a sum or a difference, sum |x| for a sum over an axis, else the value's own size.
    """
    out = next(o for o in program.outputs if o.name == name)
    node = program.nodes[out.node]
    if node.op == "acc":
        return a.double().abs().reshape(a.shape[:-1].numel(), a.shape[-1]) @ b.double().abs()
    if node.op in ("add", "sub", "rowsum", "colsum", "totalsum"):
        program = _summing_absolutes(program, out)
    return run(program, a, b, operands, torch.float64).outputs[name].abs()


def _summing_absolutes(program: Program, out: Output) -> Program:
    """The program whose only output is |x| + |y| for the output x + y or x - y, and sum |x| for a
    sum."""
    node = program.nodes[out.node]
    nodes = [*program.nodes, *(Node("abs", (i,), (), program.nodes[i].type) for i in node.args)]
    args = tuple(range(len(program.nodes), len(nodes)))
    nodes.append(Node("add" if node.op == "sub" else node.op, args, (), node.type))
    made = Output(out.name, len(nodes) - 1, "accumulator")
    return Program.build("addends", program.operands, nodes, [made], allow_unused=True)
