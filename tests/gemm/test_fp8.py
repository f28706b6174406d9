"""fp8 operands and fp8 stores: values, dtypes, layouts, and what is refused."""

from __future__ import annotations

import pytest
import torch
from helpers.budget import norm

import codetta
from codetta import errors, programs
from codetta.arguments import FP8_PAIRS
from codetta.language import Col, Row, Scalar, epilogue, round_to, rowsum, store, unpack

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = {
    "row": (1, 200, 64),
    "aligned": (256, 384, 128),
    "ragged": (129, 328, 40),
    "odd": (77, 203, 51),
    "tall": (301, 139, 7),
}
every_pair = pytest.mark.parametrize("dtypes", FP8_PAIRS, ids=lambda p: f"{p[0]}-{p[1]}")
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def normal(*shape, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    made = torch.randn(shape, generator=generator, device="cpu")
    return made.to(torch.get_default_device())


def product(shape, dtypes=(E4, E4)):
    """a, b as the transpose of a weight, and scales by row and by column."""
    m, n, k = shape
    a, w = normal(m, k, seed=1).to(dtypes[0]), normal(n, k, seed=2).to(dtypes[1])
    return a, w.t(), normal(m, seed=3).abs() + 0.5, (normal(n, seed=4).abs() + 0.5) / k**0.5


def exactly(a, b, sa, sb):
    """The scaled product in fp64, and the sum of the magnitudes of its addends."""
    a, b = a.double(), b.double()
    scale = sa.double()[:, None] * sb.double()
    return (a @ b) * scale, (a.abs() @ b.abs()) * scale.abs()


def as_near_as_torch(out, exact):
    """Assert that the error is that of rounding the exact values once; twice it, for sums in the
    tensor cores."""
    largest = torch.finfo(out.dtype).max
    rounded = exact.clamp(-largest, largest).to(out.dtype).double()
    assert norm(out.double() - exact) <= 2 * norm(rounded - exact) + 1e-6 * norm(exact)


# ---------------------------------------------------------------------------------------- values
@every_shape
@every_pair
def test_a_scaled_product_is_stored_in_bf16(backend, dtypes, shape):
    a, b, sa, sb = product(shape, dtypes)
    out = codetta.gemm(a, b, programs.fp8_scaled, sa=sa, sb=sb)
    exact, _ = exactly(a, b, sa, sb)
    assert out.dtype is torch.bfloat16
    as_near_as_torch(out, exact)


@every_shape
def test_a_bias_is_added_before_rounding(backend, shape):
    a, b, sa, sb = product(shape)
    bias = normal(shape[1], seed=5)
    out = codetta.gemm(a, b, programs.fp8_scaled_bias, sa=sa, sb=sb, bias=bias)
    exact, _ = exactly(a, b, sa, sb)
    exact = exact + bias.double()
    as_near_as_torch(out, exact)


@every_shape
@pytest.mark.parametrize("stored, pair", [("e4m3", (E4, E4)), ("e5m2", (E5, E4))])
def test_a_product_is_quantized_and_its_largest_magnitudes_are_kept(backend, stored, pair, shape):
    a, b, sa, sb = product(shape, pair)
    program, scale = programs.fp8_quantized(stored), 16.0
    out = codetta.gemm(a, b, program, sa=sa, sb=sb, scale=scale)
    exact, addends = exactly(a, b, sa, sb)
    assert out.y.dtype is (E4 if stored == "e4m3" else E5)
    assert out.y.shape == exact.shape
    as_near_as_torch(out.y, exact * scale)
    largest = exact.abs().amax(1)
    assert out.amax.dtype is torch.float32
    assert (out.amax.double() - largest).norm() <= 1e-5 * addends.amax(1).norm() + 1e-3 * (
        largest.norm() if backend == "cuda" else 0.0  # fast accumulation
    )


def test_raw_gives_the_largest_magnitude_of_each_row_in_each_tile(backend):
    a, b, sa, sb = product((130, 300, 64))
    tile = (128, 128)
    program = programs.fp8_quantized()
    raw = codetta.gemm(a, b, program, sa=sa, sb=sb, scale=1.0, tile=tile, raw=True)
    exact, _ = exactly(a, b, sa, sb)
    tiles = torch.nn.functional.pad(exact.abs(), (0, 384 - 300)).reshape(130, 3, 128).amax(2)
    assert raw.amax.shape == (130, 3)
    torch.testing.assert_close(raw.amax.double(), tiles, rtol=2e-3, atol=1e-6)


# ---------------------------------------------------------------------------------------- stores
@pytest.mark.parametrize("dtype, largest", [("e4m3", 448.0), ("e5m2", 57344.0)])
def test_an_fp8_store_saturates_and_keeps_nan(backend, dtype, largest):
    @epilogue
    def kept(acc, c: Col):
        return {"x": store(acc * c, dtype), "seen": round_to(acc * c, dtype)}

    a, b = torch.ones(6, 16).to(E4), torch.ones(32, 16).to(E4).t()
    c = torch.tensor([1.0, 1e9, -1e9, float("inf"), float("-inf"), float("nan")])
    out = codetta.gemm(a, b, kept, c=c)
    expected = torch.tensor([16.0, largest, -largest, largest, -largest, float("nan")])
    for x in (out.x.float(), out.seen.float()):
        assert torch.equal(x[:, 0].nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(x.nan_to_num(7.0), x[:, :1].expand(6, 32).nan_to_num(7.0))


def test_nothing_is_rounded_to_fp8_without_being_told(backend):
    @epilogue
    def several(acc, r: Row):
        x = round_to(acc)
        return {"x": x, "wide": store(acc, "accumulator"), "s": rowsum(x * r)}

    a, b, _, _ = product((40, 64, 48))
    out = codetta.gemm(a, b, several, r=torch.ones(64))
    exact = a.double() @ b.double()
    assert (out.x.dtype, out.wide.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out.x, out.wide.bfloat16())
    torch.testing.assert_close(out.s, out.x.float().sum(1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out.wide.double(), exact, rtol=1e-3, atol=1e-3 * 48**0.5)
    assert codetta.gemm(a, b).dtype is torch.bfloat16


def test_a_16_bit_product_can_be_stored_in_fp8(backend):
    @epilogue
    def quantized(acc, scale: Scalar):
        return store(acc * scale, "e4m3")

    a, w = normal(70, 48).bfloat16(), normal(90, 48, seed=1).bfloat16()
    out = codetta.gemm(a, w.t(), quantized, scale=2.0)
    exact = 2 * (a.double() @ w.t().double())
    as_near_as_torch(out, exact)


def test_pairs_stored_half_as_wide_in_fp8(backend):
    @epilogue
    def gated(acc):
        g, u = unpack(acc)
        return store(g * u, "e4m3")

    a, b, _, _ = product((33, 96, 32))
    exact = a.double() @ b.double()
    exact = exact[:, 0::2] * exact[:, 1::2]
    as_near_as_torch(codetta.gemm(a, b, gated), exact)


def test_writes_into_out(backend):
    a, b, sa, sb = product((40, 64, 48))
    program = programs.fp8_quantized()
    out = {"y": torch.empty(40, 64, dtype=E4), "amax": torch.empty(40)}
    given = {"sa": sa, "sb": sb, "scale": 1.0}
    written = codetta.gemm(a, b, program, out=out, **given)
    fresh = codetta.gemm(a, b, program, **given)
    assert written.y is out["y"]
    assert torch.equal(out["y"].float(), fresh.y.float())
    assert torch.equal(out["amax"], fresh.amax)


# --------------------------------------------------------------------------------------- layouts
@pytest.mark.parametrize("layout", ["m-major", "pitched", "shifted", "expanded", "odd k"])
def test_any_layout_is_read(backend, layout):
    a, b, sa, sb = product((70, 90, 48))
    same = codetta.gemm(a, b, programs.fp8_scaled, sa=sa, sb=sb)
    if layout == "m-major":
        a, b = a.t().contiguous().t(), b.contiguous()
    elif layout == "pitched":
        a, b = (torch.cat((x, x), 1)[:, : x.shape[1]] for x in (a, b))
    elif layout == "shifted":
        a, b = (torch.cat((x, x), 1)[:, 1 : x.shape[1] + 1] for x in (a, b))
    elif layout == "expanded":
        a = a[:1].expand(70, -1)
    else:
        a, b = a[:, :47], b[:47]
    out = codetta.gemm(a, b, programs.fp8_scaled, sa=sa, sb=sb)
    if layout in ("m-major", "pitched"):
        assert torch.equal(out, same)
    exact, _ = exactly(a, b, sa, sb)
    as_near_as_torch(out, exact)


def test_batches_and_empty_sizes(backend):
    a, b, _, sb = product((24, 32, 16))
    sa = torch.ones(2, 3, 4)
    out = codetta.gemm(a.reshape(2, 3, 4, 16), b, programs.fp8_scaled, sa=sa, sb=sb)
    flat = codetta.gemm(a, b, programs.fp8_scaled, sa=sa.flatten(), sb=sb)
    assert torch.equal(out.reshape(24, 32), flat)
    none = codetta.gemm(a[:0], b, programs.fp8_quantized(), sa=sa.flatten()[:0], sb=sb, scale=1.0)
    assert (none.y.shape, none.y.dtype, none.amax.shape) == ((0, 32), E4, (0,))


def test_a_product_of_fp8_is_accumulated_in_place(backend):
    a, b, _, _ = product((40, 64, 48))
    target = torch.ones(40, 64)
    codetta.gemm_accumulate_(target, a, b)
    exact = a.double() @ b.double()
    torch.testing.assert_close(target.double(), 1 + exact, rtol=1e-3, atol=1e-3 * 48**0.5)


# ------------------------------------------------------------------------------------ frameworks
def test_autocast_leaves_fp8_alone(backend):
    a, b, sa, sb = product((40, 64, 48))
    device = torch.get_default_device().type
    with torch.autocast(device, dtype=torch.bfloat16):
        out = codetta.gemm(a, b, programs.fp8_quantized(), sa=sa, sb=sb, scale=1.0)
        with pytest.raises(errors.Fp8Pair):
            codetta.gemm(a, b.float(), programs.fp8_scaled, sa=sa, sb=sb)
    plain = codetta.gemm(a, b, programs.fp8_quantized(), sa=sa, sb=sb, scale=1.0)
    assert torch.equal(out.y.float(), plain.y.float())


def test_fake_tensors_have_the_dtypes_of_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    a, b, sa, sb = product((40, 64, 48))
    real = codetta.gemm(a, b, programs.fp8_quantized(), sa=sa, sb=sb, scale=1.0)
    with FakeTensorMode() as mode:
        given = {n: mode.from_tensor(x) for n, x in (("sa", sa), ("sb", sb))}
        fake = codetta.gemm(
            mode.from_tensor(a), mode.from_tensor(b), programs.fp8_quantized(), scale=1.0, **given
        )
        assert codetta.gemm(mode.from_tensor(a), mode.from_tensor(b)).dtype is torch.bfloat16
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in real]


def test_a_compiled_graph_holds_one_operator(backend):
    a, b, sa, sb = product((40, 64, 48))
    program = programs.fp8_quantized()

    def call(a, b, sa, sb):
        return codetta.gemm(a, b, program, sa=sa, sb=sb, scale=2.0)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(a, b, sa, sb), call(a, b, sa, sb), strict=True):
        assert x.dtype is y.dtype
        assert torch.equal(x.float(), y.float())


# ---------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    "dtypes", [(E5, E5), (E4, torch.bfloat16), (torch.float32, E4), (E5, torch.float16)]
)
def test_other_pairs_are_refused_by_name(dtypes):
    a, b, sa, sb = product((8, 16, 32))
    with pytest.raises(errors.Fp8Pair, match=str(dtypes[0])):
        codetta.gemm(a.to(dtypes[0]), b.to(dtypes[1]), programs.fp8_scaled, sa=sa, sb=sb)


@pytest.mark.parametrize("name", ["a", "b", "sa"])
def test_a_gradient_through_fp8_is_refused_by_name(name):
    a, b, sa, sb = product((8, 16, 32))
    given = {"a": a, "b": b, "sa": sa, "sb": sb}
    given[name] = given[name].detach().requires_grad_()
    with pytest.raises(errors.Fp8NeedsNoGrad, match=rf"\b{name} requires grad"):
        codetta.gemm(epilogue=programs.fp8_scaled, **given)
    with torch.no_grad():
        codetta.gemm(epilogue=programs.fp8_scaled, **given)


def test_a_gradient_through_an_fp8_store_is_refused_by_name():
    a = normal(8, 32).requires_grad_()
    with pytest.raises(errors.Fp8NeedsNoGrad, match="fp8 store, 'y'"):
        codetta.gemm(
            a, normal(32, 16), programs.fp8_quantized(), sa=normal(8), sb=normal(16), scale=1.0
        )


def test_a_matrix_loaded_by_the_epilogue_is_not_fp8():
    a, b, _, _ = product((8, 16, 32))
    with pytest.raises(errors.OperandDtype):
        codetta.gemm(a, b, programs.residual, residual=torch.zeros(8, 16).to(E4))


def test_the_accumulation_is_fast_or_full():
    with pytest.raises(errors.BadAttribute, match="'fast' or 'full'"):
        codetta.fp8_accumulation("exact")
