"""The canonical text: parse(str(p)) == p, for any program; order and local names do not matter."""

from __future__ import annotations

import operator
from fractions import Fraction

import pytest
from helpers.cases import CASES
from hypothesis import given, settings
from hypothesis import strategies as st

import codetta
from codetta.errors import CodettaError, ProgramSyntax
from codetta.language import Col, Operand, Output, Program, Row, Tile, epilogue
from codetta.language import functions as f
from codetta.language.trace import ProgramTracer
from codetta.language.types import Kind
from codetta.programs import catalog

UNARY = ["neg", "abs", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "erf", "sigmoid",
         "relu", "silu", "gelu", "square"]  # fmt: skip
BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, f.maximum, f.minimum]
PAIRS = ["adjacent", "halves", "halves:4", "halves:8"]
REDUCE = [f.rowsum, f.rowmean, f.rowmax, f.logsumexp, f.colsum, f.colmax, f.totalsum]


def step(draw, pool, rope, index):
    """One random operation on values of the pool; may raise one of the named errors."""
    x, y = (pool[draw(st.integers(0, len(pool) - 1))] for _ in range(2))
    number = draw(st.one_of(st.integers(-3, 3), st.floats(allow_nan=False, allow_infinity=False)))
    return draw(
        st.sampled_from(
            [
                lambda: getattr(f, draw(st.sampled_from(UNARY[1:])))(x),
                lambda: -x,
                lambda: draw(st.sampled_from(BINARY))(x, y),
                lambda: draw(st.sampled_from(BINARY))(x, number),
                lambda: x**number,
                lambda: f.where(x < y, x, number),
                lambda: f.where(x == number, y, x),
                lambda: f.round_to(x, draw(st.sampled_from(f.DTYPES))),
                lambda: f.unpack(x, draw(st.sampled_from(PAIRS)))[draw(st.integers(0, 1))],
                lambda: f.pack(x, y, draw(st.sampled_from(PAIRS))),
                lambda: f.group_sum(x, draw(st.integers(1, 8))),
                lambda: f.ungroup(x, draw(st.integers(1, 8))),
                lambda: f.rotate(x, rope, head_dim=8, rotary_dim=draw(st.sampled_from([2, 8]))),
                lambda: f.select(x, index),
                lambda: f.logsumexp(x, y)[draw(st.integers(0, 1))],
                lambda: f.moments(x)[draw(st.integers(0, 1))],
                lambda: draw(st.sampled_from(REDUCE))(x),
                lambda: x / f.columns(y),
            ]
        )
    )()


OPERANDS = [
    Operand("c", Kind.TILE),
    Operand("d", Kind.TILE, Fraction(2)),
    Operand("h", Kind.TILE, Fraction(1, 2), "halves"),
    Operand("g", Kind.ROW, Fraction(1, 4)),
    Operand("w", Kind.ROW),
    Operand("r", Kind.COL),
    Operand("s", Kind.SCALAR),
]
ROPE, INDEX = Operand("rope", Kind.ROTARY), Operand("i", Kind.INDEX)


@st.composite
def programs(draw):
    """A random program: what the rules refuse is left out, what is unused is removed."""
    tracer = ProgramTracer("random")
    rope, index = tracer.operand(ROPE), tracer.operand(INDEX)
    pool = [tracer.acc(), *(tracer.operand(o) for o in OPERANDS)]
    for _ in range(draw(st.integers(1, 12))):
        try:
            pool.append(step(draw, pool, rope, index))
        except CodettaError:
            continue
    made = [v for v in pool[1 + len(OPERANDS) :] if v.type.kind is Kind.TILE or v.type.reduced]
    outputs = [
        Output(f"y{n}", v.id, draw(st.sampled_from(f.DTYPES)))
        for n, v in enumerate(made[-3:] or pool[:1])
    ]
    operands = [*OPERANDS, ROPE, INDEX]
    return Program.build("random", operands, tracer.nodes, outputs, allow_unused=True)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(programs())
def test_any_program_is_read_back_from_its_text(program):
    again = Program.parse(str(program))
    assert again == program
    assert str(again) == str(program)
    assert hash(again) == hash(program)
    assert again.digest == program.digest
    assert Program.parse(program.line) == program
    assert (again.granule, again.reductions) == (program.granule, program.reductions)


@pytest.mark.parametrize("name", CASES)
def test_programs_and_their_derivatives_are_read_back(name):
    for program in (CASES[name], *codetta.vjp(CASES[name]).passes):
        assert Program.parse(str(program)) == program


@pytest.mark.parametrize("name", catalog())
def test_the_line_says_what_the_text_says(name):
    program = catalog()[name].program
    for p in (program, *codetta.vjp(program).passes):
        assert len(p.line.splitlines()) == 1
        assert Program.parse(p.line) == p
        assert Program.parse(p.line).text == p.text


def test_order_of_statements_and_local_names_do_not_matter():
    def first(acc, r: Col, w: Row):
        scaled = acc * r
        gain = 1.0 + w
        unused = scaled * 3.0  # noqa: F841
        return {"x": scaled * gain, "s": f.rowsum(scaled)}

    def second(acc, r: Col, w: Row):
        b = 1.0 + w
        c = f.rowsum(acc * r)
        a = acc * r
        return {"x": a * b, "s": c}

    first.__name__ = second.__name__ = "f"
    assert epilogue(first) == epilogue(second)


@pytest.mark.parametrize(
    "change",
    [
        lambda acc, r: {"x": acc * r + 1.0},
        lambda acc, r: {"y": acc * r},
        lambda acc, r: {"x": f.store(acc * r, "fp32")},
        lambda acc, r: {"x": r * acc},
        lambda acc, r: acc * r,
    ],
)
def test_what_matters_changes_the_text(change):
    def plain(acc, r: Col):
        return {"x": acc * r}

    def changed(acc, r: Col):
        return change(acc, r)

    plain.__name__ = changed.__name__ = "f"
    assert epilogue(plain) != epilogue(changed)
    assert epilogue(plain).text != epilogue(changed).text


def test_the_text_is_what_the_documentation_shows():
    def residual_ssq(acc, residual: Tile):
        x = f.round_to(acc + residual)
        return {"x": x, "ssq": f.rowsum(x * x)}

    assert str(epilogue(residual_ssq)) == (
        "program residual_ssq(acc, residual: Tile) {\n"
        "  %0 = acc\n"
        "  %1 = operand(name=residual)\n"
        "  %2 = add(%0, %1)\n"
        "  %3 = round_to(%2, dtype=operand)\n"
        "  %4 = mul(%3, %3)\n"
        "  %5 = rowsum(%4)\n"
        "  store x: operand = %3\n"
        "  final ssq: accumulator = %5\n"
        "}"
    )


TEXT = str(CASES["gated_adjacent"])
BROKEN = {
    "empty": "",
    "no header": TEXT.split("\n", 1)[1],
    "no end": TEXT.rsplit("\n", 1)[0],
    "unknown primitive": TEXT.replace("mul", "frobnicate", 1),
    "unknown kind": TEXT.replace("Col", "Column"),
    "later node": TEXT.replace("mul(%0, %1)", "mul(%0, %9)"),
    "number skipped": TEXT.replace("%2 =", "%3 =", 1),
    "one argument": TEXT.replace("mul(%0, %1)", "mul(%0)"),
    "no attribute": TEXT.replace("unpack(%2, member=0, pairs=adjacent)", "unpack(%2)"),
    "undeclared operand": TEXT.replace("operand(name=r)", "operand(name=q)"),
    "no such node": TEXT.replace("store z: operand = %", "store z: operand = %9"),
    "no output": "program f(acc) {\n  %0 = acc\n}",
    "junk": TEXT.replace("{", "{\n  import os", 1),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_text_is_refused_with_its_line(text):
    with pytest.raises(ProgramSyntax, match=r"line \d+ of the program text"):
        Program.parse(text)


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_line_is_refused_as_the_same_line_of_the_text(text):
    said = []
    for form in (text, text.replace("\n", ";")):
        with pytest.raises(ProgramSyntax) as error:
            Program.parse(form)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_a_text_that_says_something_impossible_is_refused_like_a_function():
    with pytest.raises(CodettaError, match="pair"):
        Program.parse(TEXT.replace("pairs=adjacent", "pairs=interleaved"))
