"""`finalizer`: Programs without an accumulator, whose outputs may be vectors."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from program_oracle import run

from codetta.errors import BadOutput, BooleanValue, MissingAnnotation, ReservedName
from codetta.language import Col, Index, Program, Row, Scalar, Tile, epilogue, finalizer, rowsum


@finalizer
def mixed(x: Tile, r: Col, w: Row, scale: Scalar):
    return {"y": x * r, "c": r * scale, "v": w + scale, "s": scale * 2.0, "t": rowsum(x * w) / r}


def test_vectors_tiles_and_reductions_are_outputs_of_one_program():
    x, r, w = torch.randn(5, 3), torch.rand(5) + 1, torch.randn(3)
    out = run(mixed, None, shape=(5, 3), dtype=torch.bfloat16, x=x.bfloat16(), r=r, w=w, scale=3.0)
    assert not mixed.has_acc
    assert [v.shape for v in vars(out).values()] == [(5, 3), (5,), (3,), (), (5,)]
    assert out.y.dtype == torch.bfloat16  # tiles in the operands' dtype, vectors in fp32
    assert {v.dtype for k, v in vars(out).items() if k != "y"} == {torch.float32}
    torch.testing.assert_close(out.c, r * 3)
    torch.testing.assert_close(out.t, (x.bfloat16().float() * w).sum(1) / r)


def test_text_round_trip():
    assert Program.parse(str(mixed)) == mixed


def test_a_vector_is_still_no_output_of_an_epilogue():
    with pytest.raises(BadOutput, match="compute it outside"):
        epilogue(vector_output)


def vector_output(acc, r: Col):
    return {"x": acc * r, "r": r * 2.0}


def indices_out(i: Index):
    return {"i": i}


def takes_acc(acc: Tile):
    return acc


def undeclared(r):
    return r


def comparison_out(r: Col):
    return r > 0


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (indices_out, BadOutput),
        (takes_acc, ReservedName),
        (undeclared, MissingAnnotation),
        (comparison_out, BooleanValue),
    ],
)
def test_mistakes_are_named_with_the_line(function, error):
    with pytest.raises(error, match=rf"test_finalizer.py:\d+: def {function.__name__}"):
        finalizer(function)


def test_annotations_may_use_names_of_the_enclosing_function():
    size = 4
    per_group = Row(width=Fraction(1, size))

    @finalizer
    def grouped(w: per_group, v: Row(width=Fraction(1, size))):
        return w * v

    assert [o.width for o in grouped.operands] == [Fraction(1, 4)] * 2
