"""Single primitives in generated kernels: special values, heads, indices, finalizers, mutations."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from triton_cases import library
from triton_runner import DEVICE, agree, check, inputs

from codetta.backends.calls import REFERENCE
from codetta.backends.cuda import triton_kernels
from codetta.backends.cuda.finalize import finalizer as finalizer_of
from codetta.backends.cuda.triton_folds import Fold
from codetta.backends.cuda.triton_kernels import pointwise
from codetta.backends.cuda.triton_lowering import LOWERING
from codetta.language import Col, Index, Rotary, Row, Scalar, Tile, finalizer
from codetta.language import functions as f
from codetta.language.primitives import COMPARISONS, REDUCTION, REDUCTIONS
from codetta.language.program import Operand, Output, Program
from codetta.language.trace import ProgramTracer
from codetta.language.types import Kind

INF, NAN = float("inf"), float("nan")
LIBRARY = library()


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], device=DEVICE)


# -------------------------------------------------------------------------------------- maps
def run_map(function, *tiles: torch.Tensor):
    names = {"x": Tile, "y": Tile}
    operands = [Operand(name, Kind.TILE) for name in list(names)[: len(tiles)]]
    tracer = ProgramTracer("map_under_test")
    result = function(*(tracer.operand(o) for o in operands))
    program = Program.build(
        "map_under_test", operands, tracer.nodes, [Output("o", result.id, "accumulator")]
    )
    m, n = tiles[0].shape
    return check(program, list(tiles), m, n, torch.float32)


@pytest.mark.parametrize("name", ["exp", "sqrt", "rsqrt", "log", "tanh", "erf", "sigmoid", "relu"])
def test_maps_at_their_edges(name):
    run_map(getattr(f, name), values(-INF, -100.0, -1.0, -1e-4, 0.0, 1e-4, 0.6, 100.0, INF, NAN))


def test_tanh_keeps_the_digits_of_small_numbers():
    x = torch.logspace(-6, 0.5, 200, device=DEVICE)[None]
    (got,) = run_map(f.tanh, x)
    exact = x.double().tanh()
    assert ((got - exact) / exact).abs().max() < 4e-7


@pytest.mark.parametrize("exponent", [0, 1, 2, 5, 16, 17, -1, -3, 0.5, 1.5, -0.5, -2.5, 0.3, -1.7])
def test_powers(exponent):
    x = torch.linspace(0.6, 1.7, 30, device=DEVICE)[None]
    run_map(lambda v: f.pow(v, exponent), x)
    run_map(lambda v: f.pow(v, exponent), -x)


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_nan_wins_a_comparison(name):
    run_map(getattr(f, name), values(1.0, NAN, 2.0, -INF, NAN), values(NAN, 1.0, 1.0, 3.0, NAN))


def test_rounding_inside_a_program():
    x = torch.randn(5, 40, device=DEVICE)
    for dtype in ("bf16", "fp16", "fp32"):
        (got,) = run_map(lambda v, dtype=dtype: f.round_to(v * 1.1, dtype) * 3.0, x)
        assert got.dtype is torch.float32


@pytest.mark.parametrize("what", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["rowmax", "rowsum", "logsumexp", "colmax", "colsum", "totalsum"])
def test_reductions_of_special_values(name, what):
    x = torch.randn(5, 37, device=DEVICE)
    x[2, 30] = x[4, 1] = what
    run_map(getattr(f, name), x)


def test_a_row_without_a_finite_element():
    x = torch.full((2, 5), -INF, device=DEVICE)
    run_map(f.logsumexp, x)
    run_map(f.rowmax, x)


def test_variance_far_from_zero():
    x = 1e4 + torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    @finalizer
    def variance(x: Tile):
        return f.moments(x)[1]

    (got,) = pointwise(variance, [x], 3, 1000, torch.float32, torch.float32)
    assert (got / x.double().var(1, correction=0) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("tile", [None, (3, 96)], ids=["in one pass", "from partials"])
@pytest.mark.parametrize("size", [1e20, 1e30])
def test_a_variance_whose_squares_overflow_is_infinite_and_not_nan(size, tile):
    """The states begin with no columns: 0 times the square of a difference is 0."""
    x = size * (2 + torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))).to(DEVICE)

    @finalizer
    def statistics(x: Tile):
        mean, variance = f.moments(x)
        return {"mean": mean, "rstd": f.rsqrt(variance + 1e-5)}

    m, n = x.shape
    if tile is None:
        mean, rstd = check(statistics, [x], m, n, torch.float32)
    else:
        mean, rstd = _from_partials(statistics, x, tile)
    assert (rstd == 0.0).all()
    exact = x.double().mean(1)
    assert (mean.double().reshape(-1) - exact).abs().max() < 1e-5 * size


def _from_partials(program: Program, x: torch.Tensor, tile: tuple[int, int]):
    """The finals of a program of one Tile by its finalizer, as after a GEMM."""
    m, n = x.shape
    raw = REFERENCE.pointwise(program, [x], m, n, torch.float32, torch.float32, tile, True)
    finals = finalizer_of(program)
    assert finals is not None
    # Both reductions keep the same three numbers.
    given = [raw[component] for _, component in finals.reads]
    return check(finals.program, given, m, n, torch.float32)


# ----------------------------------------------------------------------------- pairs and heads
@pytest.mark.parametrize("pairs", ["adjacent", "halves"])
@pytest.mark.parametrize(
    "head, rotary, heads", [(8, 8, -1), (8, 8, 2), (8, 4, 2), (6, 4, 3), (5, 4, 2)]
)
def test_rotations(pairs, head, rotary, heads):
    @finalizer
    def turned(x: Tile, r: Col, rope: Rotary):
        turn = {"head_dim": head, "rotary_dim": rotary, "heads": heads, "pairs": pairs}
        z = f.rotate(x * r, rope, **turn)
        return {"z": z, "back": f.rotate(x, rope, inverse=True, **turn), "s": f.rowsum(z * x)}

    n = 4 * head
    check(turned, inputs(turned, 5, n, torch.float32), 5, n, torch.float32)


def test_columns_that_are_not_rotated_pass_bit_for_bit():
    @finalizer
    def turned(x: Tile, rope: Rotary):
        return f.rotate(x, rope, head_dim=4, heads=1)

    x, table, positions = inputs(turned, 3, 12, torch.float32)
    x[:, 4:8], x[:, 8:] = INF, NAN
    (got,) = pointwise(turned, [x, table, positions], 3, 12, torch.float32, torch.float32)
    assert torch.equal(got[:, 4:8], x[:, 4:8]) and got[:, 8:].isnan().all()
    assert got[:, :4].isfinite().all()


def test_a_position_outside_the_table_is_nan_and_only_its_row():
    @finalizer
    def turned(x: Tile, rope: Rotary):
        return f.rotate(x, rope, head_dim=4)

    x, table, positions = inputs(turned, 3, 8, torch.float32)
    positions[1] = 11
    (got,) = pointwise(turned, [x, table, positions], 3, 8, torch.float32, torch.float32)
    assert got[1].isnan().all() and got[[0, 2]].isfinite().all()


@pytest.mark.parametrize("size", [3, 8, 96])
@pytest.mark.parametrize("pairs", ["adjacent", "halves"])
def test_groups(size, pairs):
    @finalizer
    def per_head(x: Tile, w: Row, g: Row(width=Fraction(1, size))):
        scale = f.rsqrt(f.group_mean(x * x, size) + g * g)
        y = x * f.ungroup(scale, size) * w
        a, b = f.unpack(y, pairs)
        return {"y": y, "h": a * b, "c": f.colsum(y)}

    n = 4 * size
    check(per_head, inputs(per_head, 3, n, torch.float32), 3, n, torch.float32)


def test_pairs_of_pairs_and_two_group_sizes():
    @finalizer
    def nested(x: Tile, y: Tile):
        a, b = f.unpack(x, "halves:8")
        c, d = f.unpack(a + b, "adjacent")
        twice = f.pack(x, y, "halves")
        groups = f.ungroup(f.group_sum(x, 4), 4) + f.ungroup(f.group_sum(y, 6), 6)
        return {"q": c * d, "t": twice, "s": f.rowsum(twice * twice), "g": groups}

    check(nested, inputs(nested, 3, 48, torch.float32), 3, 48, torch.float32)


# ------------------------------------------------------------------------------------ operands
def test_indices_out_of_range_select_zero_and_int32_works():
    @finalizer
    def chosen(x: Tile, i: Index):
        return {"v": f.select(x, i), "h": f.onehot(i, x) * x}

    x = torch.randn(5, 9, device=DEVICE)
    for dtype in (torch.int64, torch.int32):
        index = torch.tensor([[-100], [0], [8], [9], [3]], dtype=dtype, device=DEVICE)
        value, _ = check(chosen, [x, index], 5, 9, torch.float32)
        assert value[0] == value[3] == 0 and value[2] == x[2, 8]


def test_expanded_operands_and_views():
    @finalizer
    def mixed(x: Tile, y: Tile, r: Col, w: Row, s: Scalar):
        return {"z": x * y * r + w * s, "c": f.colsum(x * y)}

    wide = torch.randn(6, 40, device=DEVICE)
    operands = [
        torch.randn(1, 1, device=DEVICE).expand(6, 17),
        wide[:, 3:20],
        torch.randn(1, 1, device=DEVICE).expand(6, 1),
        wide[:1, ::2][:, :17],
        torch.tensor([[3.0]], device=DEVICE),
    ]
    check(mixed, operands, 6, 17, torch.float32)


def test_vectors_and_scalars_as_outputs():
    @finalizer
    def vectors(x: Tile, r: Col, w: Row, s: Scalar):
        return {"c": r * r, "w": w + s, "s": s * s, "x": x, "t": f.colsum(r) * f.rowsum(x)}

    check(vectors, inputs(vectors, 9, 21, torch.float32), 9, 21, torch.float32)
    raw = (vectors, inputs(vectors, 9, 21, torch.float32), 9, 21, torch.float32, (4, 8), True)
    check(*raw)


@pytest.mark.parametrize("m, n", [(0, 8), (3, 0), (0, 0)])
def test_nothing_to_compute(m, n):
    for name in ("row_rms", "layernorm_apply_backward", "rms_link_coefficient"):
        check(LIBRARY[name], inputs(LIBRARY[name], m, n, torch.float32), m, n, torch.float32)


def test_a_kernel_serves_every_m_and_does_not_write_its_inputs():
    program = LIBRARY["rms_link_dgrad"]
    for m in (1, 16, 33):
        operands = inputs(program, m, 32, torch.float32)
        before = [x.clone() for x in operands]
        check(program, operands, m, 32, torch.float32)
        assert all(torch.equal(x, y) for x, y in zip(operands, before, strict=True))
    recipe = next(v for k, v in triton_kernels._RECIPES.items() if k[0] == program.text)
    assert len(recipe.first.sources) <= 2  # a tile of one row is contiguous in any stride


# ---------------------------------------------------------------------------------- finalizers
@pytest.mark.parametrize("reduction", sorted(REDUCTIONS))
def test_finalizers_combine_stored_partials(reduction):
    parts = len(REDUCTION[reduction].components)
    tracer = ProgramTracer("combined")
    operands = [Operand(f"p{k}", Kind.PARTIAL) for k in range(parts)]
    partials = [tracer.operand(o) for o in operands]
    total = tracer.emit("combine", *partials, reduction=reduction, width=1, path="")
    outputs = [Output("o", (total * 2.0).id, "accumulator")]
    program = Program.build("combined", operands, tracer.nodes, outputs)
    m, n, tiles = 37, 21, 70
    rows = {"totalsum": (5, tiles), "colsum": (tiles, n), "colmax": (tiles, n)}
    shape = rows.get(reduction, (m, tiles))
    g = torch.Generator().manual_seed(0)
    operands = [torch.randn(shape, generator=g).to(DEVICE) for _ in range(parts)]
    if parts == 3 and reduction != "rowsoftmean":
        operands[0] = operands[0].abs().ceil()  # counts
    else:
        operands[1:] = [x.abs() for x in operands[1:]]
    for given in (operands, [x.t().contiguous().t() for x in operands]):
        check(program, given, m, n, torch.float32)


# ----------------------------------------------------------------------------------- mutations
def _wrong(rule, boolean: bool):
    if isinstance(rule, Fold):
        return replace(rule, result=lambda emit, state: f"{rule.result(emit, state)} + 1.0")
    template = "{0} == 0" if boolean else "{0} + 1.0"
    return lambda emit, node, at: emit.apply(template, rule(emit, node, at))


@pytest.mark.parametrize("name", sorted(LOWERING._rules))
def test_a_wrong_entry_of_the_table_is_caught(name, monkeypatch):
    if name == "combine":
        program = LIBRARY["case_column_sums"]
    else:
        found = [p for p in LIBRARY.values() if any(x.op == name for x in p.nodes)]
        program = found[-1] if found else _with(name)
    m, n = 6, -(-24 // program.granule) * program.granule
    operands = inputs(program, m, n, torch.float32)
    for kept in ("_RECIPES", "_KERNELS"):
        monkeypatch.setattr(triton_kernels, kept, {})
    check(program, operands, m, n, torch.float32)
    triton_kernels._RECIPES.clear()
    triton_kernels._KERNELS.clear()
    monkeypatch.setitem(LOWERING._rules, name, _wrong(LOWERING[name], name in COMPARISONS))
    with pytest.raises(AssertionError):
        check(program, operands, m, n, torch.float32)


def _with(name: str) -> Program:
    tracer = ProgramTracer(f"with_{name}")
    x = tracer.operand(Operand("x", Kind.TILE))
    y = tracer.emit(name, *([x] if name != "minimum" else [x, x * 2.0]))
    y = f.where(y, x, 2.0) if y.type.boolean else y
    return Program.build(
        tracer.name, [Operand("x", Kind.TILE)], tracer.nodes, [Output("y", y.id, "operand")]
    )


def test_the_comparison_notices_small_errors():
    program = LIBRARY["rms_link_dgrad"]
    operands = inputs(program, 5, 24, torch.float32)
    arguments = (program, operands, 5, 24, torch.float32, torch.float32, None, False)
    (expected,) = REFERENCE.pointwise(*arguments)
    for changed in (expected * 1.0001, expected.roll(1, 0), expected.bfloat16()):
        with pytest.raises(AssertionError):
            agree(changed, expected)


@pytest.mark.parametrize("column", [3, 2400], ids=["first block", "last block"])
def test_an_infinite_mean_survives_the_other_blocks(column):
    tracer = ProgramTracer("mean")
    x = tracer.operand(Operand("x", Kind.TILE))
    made = tracer.emit("rowmean", x)
    program = Program.build(
        "mean", [Operand("x", Kind.TILE)], tracer.nodes, [Output("y", made.id, "accumulator")]
    )
    given = torch.randn(4, 2500, device=DEVICE)
    given[1, column], given[2, column], given[3, 0] = float("inf"), float("-inf"), float("nan")
    arguments = ([given], 4, 2500, torch.float32, torch.float32)
    (found,) = triton_kernels.pointwise(program, *arguments)
    assert found[0].isfinite() and found[1].isposinf() and found[2].isneginf() and found[3].isnan()
