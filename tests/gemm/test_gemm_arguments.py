"""Every wrong argument is a named error before anything runs, with the numbers and the fix."""

from __future__ import annotations

import pytest
import torch
from helpers.cases import CASES
from helpers.spy import Spy

import codetta
from codetta import errors as e

A, B = torch.ones(2, 3, 5), torch.ones(5, 8)
RMS, GATED, ROTATED, LOSS, MIXED = (
    CASES[name] for name in ("rms", "gated_adjacent", "rotated", "cross_entropy", "arithmetic")
)
LEAD = torch.ones(2, 3)
TABLE, POSITIONS = codetta.rotary_table(7, 4), torch.arange(3)
NO_ACC = codetta.vjp(CASES["silu"]).passes[0]


class Sharded(torch.Tensor):
    """A subclass, as DTensor is one."""


def mixed(**changes):
    given = {"r": LEAD, "w": torch.ones(8), "s": 2.0, "t": torch.ones(2, 3, 8)}
    return {"epilogue": MIXED, **given, **changes}


def rope(table=TABLE, positions=POSITIONS, **changes):
    return {"epilogue": ROTATED, "r": LEAD, "rope": (table, positions), **changes}


def loss(target):
    return {"epilogue": LOSS, "r": LEAD, "target": target}


# (class, part of the message, arguments that differ from gemm(A, B))
WRONG = {
    "a list": (e.NotATensor, "a must be a torch.Tensor; it is a list", {"a": [[1.0]]}),
    "b numpy": (e.NotATensor, "b must be a torch.Tensor; it is a ndarray", {"b": B.numpy()}),
    "a scalar": (e.BadRank, r"a has shape \(\); expected \(..., K\)", {"a": torch.tensor(1.0)}),
    "b a vector": (e.BadRank, r"b has shape \(5,\); expected \(K, N\)", {"b": torch.ones(5)}),
    "b a batch": (e.BadRank, r"b has shape \(1, 5, 8\)", {"b": B[None]}),
    "linear layout": (e.InnerMismatch, "w.t()", {"b": B.t()}),
    "integers": (e.UnsupportedDtype, "a has dtype torch.int32", {"a": A.int(), "b": B.int()}),
    "complex": (e.UnsupportedDtype, "complex64", {"a": A.cfloat(), "b": B.cfloat()}),
    "other fp8": (e.UnsupportedDtype, "float8", {"a": A.to(torch.float8_e4m3fnuz)}),
    "fp8 and fp32": (e.Fp8Pair, "float8", {"a": A.to(torch.float8_e4m3fn)}),
    "two dtypes": (e.DtypeMismatch, "a has dtype torch.float32 and b", {"b": B.double()}),
    "two devices": (e.DeviceMismatch, "a on cpu, b on meta", {"b": B.to("meta")}),
    "sparse": (e.UnsupportedTensor, "a is a sparse_coo tensor.*to_dense", {"a": A.to_sparse()}),
    "csr": (e.UnsupportedTensor, "b is a sparse_csr tensor", {"b": B.to_sparse_csr()}),
    "nested": (
        e.UnsupportedTensor,
        "a is a nested tensor",
        {"a": torch.nested.nested_tensor([A[0], A[1]])},
    ),
    "subclass": (e.UnsupportedTensor, "a is a Sharded.*to_local", {"a": A.as_subclass(Sharded)}),
    "lambda": (e.NotAProgram, "it is a function", {"epilogue": lambda acc: acc}),
    "name": (e.NotAProgram, "it is a str", {"epilogue": "identity"}),
    "no accumulator": (e.NotAProgram, "without an accumulator", {"epilogue": NO_ACC}),
    "missing": (e.MissingOperand, "needs the operands 'residual'", {"epilogue": RMS}),
    "unknown": (e.UnknownOperand, "no operand 'bias'", {"bias": B[0]}),
    "misspelt": (e.UnknownOperand, "no operand 'rr'.*r: Col", {"epilogue": GATED, "rr": LEAD}),
    "tile, transposed": (e.OperandShape, r"expected \(2, 3, 8\)", mixed(t=torch.ones(3, 2, 8))),
    "tile, flattened": (e.OperandShape, r"has shape \(6, 8\)", mixed(t=torch.ones(6, 8))),
    "tile, broadcast": (e.OperandShape, r"'t' \(Tile\)", mixed(t=torch.ones(1, 1, 8))),
    "col, one": (e.OperandShape, r"'r' \(Col\).*\(1,\)", mixed(r=torch.ones(1))),
    "col, of N": (e.OperandShape, r"expected \(2, 3\) or \(2, 3, 1\)", mixed(r=torch.ones(8))),
    "row, of K": (e.OperandShape, r"'w' \(Row\).*expected \(8,\)", mixed(w=torch.ones(5))),
    "row, matrix": (e.OperandShape, r"has shape \(1, 8\)", mixed(w=torch.ones(1, 8))),
    "scalar, two": (e.OperandShape, "expected one element", mixed(s=torch.ones(2))),
    "scalar, text": (e.NotATensor, "Python number", mixed(s="2.0")),
    "scalar, none": (e.NotATensor, "it is a NoneType", mixed(s=None)),
    "col, number": (e.NotATensor, "operand 'r' must be a torch.Tensor", mixed(r=1.0)),
    "col, integers": (e.OperandDtype, "'r'.*int64; expected float32", mixed(r=LEAD.long())),
    "operand, sparse": (e.UnsupportedTensor, "'t' is a sparse_coo", mixed(t=A.to_sparse())),
    "operand, device": (e.DeviceMismatch, "w on meta", mixed(w=torch.ones(8, device="meta"))),
    "index, floats": (e.OperandDtype, "'target'.*expected int64, int32", loss(LEAD)),
    "index, one-hot": (e.OperandShape, r"'target' \(Index\)", loss(torch.ones(2, 3, 8).long())),
    "rope, table alone": (e.NotATensor, r"tuple \(table, positions\)", rope() | {"rope": TABLE}),
    "rope, three": (e.NotATensor, "Rotary", rope() | {"rope": (TABLE, TABLE, POSITIONS)}),
    "rope, width": (e.OperandShape, r"table \(positions, 4\)", rope(codetta.rotary_table(7, 8))),
    "rope, positions": (e.OperandShape, "broadcastable", rope(positions=torch.arange(2))),
    "rope, rank": (e.OperandShape, "broadcastable", rope(positions=POSITIONS.view(1, 1, 1, 3))),
    "rope, floats": (e.OperandDtype, "positions: torch.float32", rope(positions=POSITIONS.float())),
    "rope, int table": (e.OperandDtype, "table: torch.int64", rope(TABLE.long())),
    "rope, behind": (e.PositionOutOfRange, "from 0 to 7, but its table has 7",
                     rope(positions=torch.tensor([0, 7, 1]))),
    "rope, negative": (e.PositionOutOfRange, "from -1", rope(positions=torch.tensor([0, -1, 1]))),
    "odd N": (e.NotDivisible, "multiple of 2 .*pairs.*; N is 7",
              {"b": B[:, :7], "epilogue": GATED, "r": LEAD}),
    "half a head": (e.NotDivisible, "multiple of 4 .*heads.*; N is 6", rope(b=B[:, :6])),
    "tile number": (e.BadTile, "not a pair", {"tile": 128}),
    "tile of three": (e.BadTile, "not a pair", {"tile": (1, 2, 3)}),
    "tile zero": (e.BadTile, "positive", {"tile": (0, 8)}),
    "tile floats": (e.BadTile, "positive integers", {"tile": (8.0, 8)}),
    "tile bool": (e.BadTile, "positive integers", {"tile": (True, 8)}),
    "tile splits pairs": (e.BadTile, "3 is no multiple of 2",
                          {"epilogue": GATED, "r": LEAD, "tile": (8, 3)}),
}  # fmt: skip


@pytest.mark.parametrize(("cls", "message", "changes"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_refused_by_name_before_anything_runs(cls, message, changes):
    arguments = {"a": A, "b": B, **changes}
    a, b = arguments.pop("a"), arguments.pop("b")
    with Spy() as spy, pytest.raises(cls, match=message) as caught:
        codetta.gemm(a, b, **arguments)
    assert type(caught.value) is cls
    if cls is not e.PositionOutOfRange:  # found where the table is read, before the product
        assert spy.calls == []


def test_too_many_heads_are_refused():
    program = CASES["rotated_partly"]
    with pytest.raises(e.NotDivisible):
        codetta.gemm(A, B[:, :3], program, rope=(TABLE[:, :2], POSITIONS), w=torch.ones(3))
    three = codetta.programs.row_scale_rotary(4, heads=3)
    with pytest.raises(e.TooFewColumns, match="3 heads of 4 columns, but its tile has only 8"):
        codetta.gemm(A, B, three, r=LEAD, rope=(TABLE, POSITIONS))


ACCEPTED = {
    "a vector": {"a": torch.ones(5)},
    "no rows": {"a": torch.ones(0, 5)},
    "parameters": {"b": torch.nn.Parameter(B)},
    "expanded": {"a": torch.ones(1, 1, 5).expand(2, 3, 5)},
    "col as a matrix": mixed(r=LEAD[..., None]),
    "scalar tensor": mixed(s=torch.tensor(2.0)),
    "scalar of one element": mixed(s=torch.ones(1, 1, 1)),
    "scalar integer": mixed(s=2),
    "operands of other dtypes": mixed(w=torch.ones(8).bfloat16(), r=LEAD.half()),
    "int32 target": loss(torch.zeros(2, 3, dtype=torch.int32)),
    "positions of one batch": rope(positions=POSITIONS),
    "positions of all tokens": rope(positions=POSITIONS.expand(2, 3)),
    "int32 positions": rope(positions=POSITIONS.int()),
    "one position": rope(positions=torch.tensor(3)),
    "positions a list": rope() | {"rope": [TABLE, POSITIONS]},
    "tile a list": {"tile": [4, 4]},
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_what_fits_is_accepted(changes):
    arguments = {"a": A, "b": B, **changes}
    a, b = arguments.pop("a"), arguments.pop("b")
    out = codetta.gemm(a, b, **arguments)
    first = out if isinstance(out, torch.Tensor) else out[0]
    assert first.shape[: a.ndim - 1] == a.shape[:-1]


def test_an_fp64_operand_widens_the_accumulator():
    a, b = torch.randn(4, 65), torch.randn(65, 3)
    residual = torch.zeros(4, 3, dtype=torch.float64)
    out = codetta.gemm(a, b, RMS, residual=residual)
    assert (out.x.dtype, out.r.dtype) == (torch.float32, torch.float64)
    assert torch.equal(out.x, (a.double() @ b.double()).float())


def test_results_are_named_tuples_that_pickle_and_flatten():
    import pickle

    out = codetta.gemm(A, B, RMS, residual=torch.zeros(2, 3, 8))
    assert out._fields == ("x", "r")
    assert repr(out).startswith("rms(x=")
    again = pickle.loads(pickle.dumps(out))
    assert type(again) is type(out)
    leaves, spec = torch.utils._pytree.tree_flatten(out)
    assert len(leaves) == 2
    assert type(torch.utils._pytree.tree_unflatten(leaves, spec)) is type(out)
    assert type(codetta.gemm(A, B, RMS, residual=torch.ones(2, 3, 8))) is type(out)


# ------------------------------------------------------------------------------ rotary_table
def test_a_rotary_table_holds_cosines_and_sines():
    table = codetta.rotary_table(6, 4, 100.0)
    angles = torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.1])
    assert (table.shape, table.dtype) == ((6, 4), torch.float32)
    torch.testing.assert_close(table, torch.cat((angles.cos(), angles.sin()), 1))


def test_a_rotary_table_takes_positions_and_a_scale():
    whole = codetta.rotary_table(12, 8)
    assert torch.equal(codetta.rotary_table(torch.tensor([3, 11]), 8), whole[[3, 11]])
    scaled = codetta.rotary_table(12, 8, scaling=2.0)
    assert torch.equal(scaled[10], whole[5])


def test_far_positions_keep_their_digits():
    far = codetta.rotary_table(torch.tensor([2**24 + 1]), 2, dtype=torch.float64)
    angle = torch.tensor(2**24 + 1, dtype=torch.float64)
    torch.testing.assert_close(far[0], torch.stack((angle.cos(), angle.sin())))


@pytest.mark.parametrize("rotary_dim", [0, 3, -2])
def test_an_odd_table_is_refused(rotary_dim):
    with pytest.raises(e.BadAttribute, match="rotary_dim"):
        codetta.rotary_table(4, rotary_dim)
