"""Programs without accumulator to test generated kernels with, and random ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction

from helpers.cases import CASES

from codetta.backends.cuda.pointwise import accumulator_loaded
from codetta.backward import vjp
from codetta.errors import CodettaError
from codetta.language.program import Operand, Output, Program
from codetta.language.trace import ProgramTracer
from codetta.language.types import Kind
from codetta.loss.epilogues import (
    derivative,
    folded,
    statistics,
    stored_derivative,
    unfolded,
    weighted_rows,
)
from codetta.loss.options import Logits
from codetta.programs.catalog import catalog

_HEAD = Logits(bias=True, scale=0.5, cap=3.0)
_SCALED = Logits(bias=True, scale=0.5, cap=3.0, rows=True)
LOSS = (
    stored_derivative(Logits(), False, False), stored_derivative(_HEAD, True, True),
    statistics(_HEAD, True, True, True, False, "rounded"), derivative(_HEAD, True, True),
    folded, weighted_rows, *(unfolded(True, True, stored) for stored in (False, True)),
    stored_derivative(_SCALED, True, True), derivative(_SCALED, True, True),
    statistics(_SCALED, True, True, True, True, "rounded"),
)  # fmt: skip


def library() -> dict[str, Program]:
    """The catalog's, the loss head's and the test suite's programs and derived backward passes.

    GEMM programs have their accumulator loaded, so that every program is here.
    """
    found: dict[str, Program] = {}
    for entry in catalog().values():
        derived = vjp(entry.program).passes if entry.has_backward else ()
        for program in (entry.program, *derived):
            found[program.name] = accumulator_loaded(program) if program.has_acc else program
    for program in LOSS:
        found[program.name] = accumulator_loaded(program) if program.has_acc else program
    for program in CASES.values():
        for each in (program, *vjp(program).passes):
            found[f"case_{each.name}"] = accumulator_loaded(each) if each.has_acc else each
    return found


# ----------------------------------------------------------------------------------- random
_UNARY = ("neg", "abs", "exp", "sin", "cos", "tanh", "erf", "sigmoid", "relu")
_BINARY = ("add", "sub", "mul", "maximum", "minimum")
_PAIRS = ("adjacent", "halves", "halves:4", "halves:6")
_REDUCTIONS = ("rowsum", "rowmax", "rowmean", "rowvar", "rowlse", "colsum", "colmax", "totalsum")
_HALF = Fraction(1, 2)


def random_programs(seed: int, count: int) -> Iterator[Program]:
    """Programs of random operations; which of them fit together, the SHAPE rules say."""
    rng = random.Random(seed)
    made = 0
    while made < count:
        program = _random_program(rng, f"random_{seed}_{made}")
        if program is not None and program.granule <= 48:
            made += 1
            yield program


def _random_program(rng: random.Random, name: str) -> Program | None:
    tracer = ProgramTracer(name)
    operands = [
        Operand("x", Kind.TILE), Operand("y", Kind.TILE), Operand("z", Kind.TILE, Fraction(2)),
        Operand("h", Kind.TILE, _HALF, rng.choice(_PAIRS)), Operand("w", Kind.ROW),
        Operand("g", Kind.ROW, Fraction(1, 4)), Operand("r", Kind.COL), Operand("s", Kind.SCALAR),
        Operand("i", Kind.INDEX), Operand("rope", Kind.ROTARY),
    ]  # fmt: skip
    values = [tracer.operand(o) for o in operands]
    index, rope = values[-2:]
    for _ in range(rng.randint(4, 14)):
        a, b = rng.choice(values[-8:]), rng.choice(values)
        try:
            values.append(_random_step(rng, tracer, a, b, index, rope))
        except CodettaError:
            continue
    outputs = [
        v for v in values[10:] if v.type.kind in (Kind.TILE, Kind.ROW, Kind.COL, Kind.SCALAR)
    ]
    outputs = [v for v in outputs if not v.type.boolean]
    if not outputs:
        return None
    chosen = rng.sample(outputs, min(len(outputs), rng.randint(1, 4)))
    dtypes = ("operand", "accumulator")
    named = [Output(f"o{k}", v.id, rng.choice(dtypes)) for k, v in enumerate(chosen)]
    return Program.build(name, operands, tracer.nodes, named, allow_unused=True)


def _random_step(rng, tracer, a, b, index, rope):
    kind = rng.randrange(9)
    emit, pairs = tracer.emit, rng.choice(_PAIRS)
    if kind == 0:
        return emit(rng.choice(_UNARY), a)
    if kind in (1, 2):
        return emit(rng.choice(_BINARY), a, b)
    if kind == 3:
        return emit("unpack", a, member=rng.randrange(2), pairs=pairs)
    if kind == 4:
        return emit("pack", a, b, pairs=pairs)
    if kind == 5:
        return emit(rng.choice(_REDUCTIONS), a)
    if kind == 6:
        return emit("where", emit("lt", a, b), a, b)
    if kind == 7:
        size = rng.choice((3, 4, 6))
        return emit(rng.choice(("group_sum", "ungroup")), a, size=size)
    special = rng.randrange(4)
    if special == 0:
        return emit("select", a, index)
    if special == 1:
        return emit("rowsoftmean", a, b)
    if special == 2:
        return emit("round_to", a, dtype=rng.choice(("bf16", "fp32")))
    return emit(
        "rotate", a, rope, head_dim=rng.choice((4, 6)), rotary_dim=4, heads=rng.choice((-1, 1)),
        pairs=rng.choice(("adjacent", "halves")), inverse=rng.random() < 0.5,
    )  # fmt: skip
