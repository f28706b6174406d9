"""A program that no kernel can run whole, cut in two where it rounds a value.

What the mainloop has no epilogue for runs as a kernel of its own over what the product stored. That
is the accumulator, in fp32; unless all that comes after goes through one value that the program
rounds to the operands' dtype, as models do whose layers are cast. Then the product's epilogue
stores that value, and the second kernel reads half as many bytes. The value may be an output as
well, and then is stored once.

Where the program reads the value both rounded and not, the second kernel reads it rounded. That is
where PyTorch has it rounded, too: what a linear layer returns is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from codetta.backends.cuda.forms import MAINLOOP
from codetta.backends.cuda.launch import explain
from codetta.language.program import Operand, Output, Program
from codetta.language.types import Kind
from codetta.language.values import Node


@dataclass(frozen=True)
class Cut:
    """Two programs in place of one.

    Attributes:
        first: of the product, with one store; ``second``: of that store, its first operand.
        kept: which output of the whole program the store is, or None.
        first_takes, second_takes: numbers of the flat operands that each takes.
    """

    first: Program
    second: Program
    kept: int | None
    first_takes: tuple[int, ...]
    second_takes: tuple[int, ...]

    def first_operands(self, operands: Sequence[Tensor]) -> list[Tensor]:
        return [operands[i] for i in self.first_takes]

    def second_operands(self, stored: Tensor, operands: Sequence[Tensor]) -> list[Tensor]:
        return [stored, *(operands[i] for i in self.second_takes)]

    def results(self, stored: Tensor, rest: list[Tensor]) -> list[Tensor]:
        return rest if self.kept is None else [*rest[: self.kept], stored, *rest[self.kept :]]


@lru_cache(maxsize=1024)
def cut_of(program: Program, dtype: torch.dtype) -> Cut | None:
    """The cut that leaves least to the second kernel, or None if there is none.

    ``dtype`` is that of a and b. What fp8 products round to is not what they are made of.
    """
    if dtype.itemsize != 2:
        return None
    for node in reversed(program.nodes):
        if node.op == "round_to" and node.attr("dtype") == "operand" and node.type.cols == 1:
            made = _at(program, node.args[0])
            if made is not None and explain(made.first, MAINLOOP[dtype]) is None:
                return made
    return None


def _at(program: Program, value: int) -> Cut | None:
    """The cut at a value, if nothing else needs the accumulator."""
    beside = [False] * len(program.nodes)  # needs it by another way than through the value
    for j, node in enumerate(program.nodes):
        beside[j] = j != value and (node.op == "acc" or any(beside[a] for a in node.args))
    if any(beside[o.node] for o in program.outputs) or program.nodes[value].type.reduced:
        return None
    kept = [
        n
        for n, o in enumerate(program.outputs)
        if o.node == value or _rounded(program, o.node) == value
    ]
    if len(kept) > 1 or any(program.outputs[n].dtype != "operand" for n in kept):
        return None
    name = _new("stored", program)
    first = Program.build(
        f"{program.name}_{name}", program.operands, program.nodes, [_store(name, value)],
        allow_unused=True,
    )  # fmt: skip
    nodes = list(program.nodes)
    nodes[value] = Node("operand", (), (("name", name),), nodes[value].type)
    rest = [o for n, o in enumerate(program.outputs) if n not in kept]
    operands = [Operand(name, Kind.TILE), *program.operands]
    second = Program.build(program.name, operands, nodes, rest, allow_unused=True)
    if second.has_acc or not second.outputs or second.operands[0].name != name:
        return None
    taken = _flat(program)
    return Cut(
        first, second, kept[0] if kept else None,
        tuple(x for o in first.operands for x in taken[o.name]),
        tuple(x for o in second.operands[1:] for x in taken[o.name]),
    )  # fmt: skip


def _rounded(program: Program, i: int) -> int | None:
    """The value that node i rounds to the operands' dtype."""
    node = program.nodes[i]
    return node.args[0] if node.op == "round_to" and node.attr("dtype") == "operand" else None


def _store(name: str, node: int) -> Output:
    return Output(name, node, "operand")


def _new(name: str, program: Program) -> str:
    taken = {o.name for o in program.operands} | {o.name for o in program.outputs}
    while name in taken:
        name += "_"
    return name


def _flat(program: Program) -> dict[str, tuple[int, ...]]:
    """Where an operand's tensors are among those of a call: a rotary operand has two."""
    found, at = {}, 0
    for o in program.operands:
        count = 2 if o.kind is Kind.ROTARY else 1
        found[o.name] = tuple(range(at, at + count))
        at += count
    return found
