"""Where the tests of generated Triton kernels run, and what they compare.

On a GPU, or in Triton's interpreter on the CPU. The interpreter is chosen for a whole process,
before Triton is imported, by TRITON_INTERPRET=1; test_triton_interpreter.py starts such a process
where there is no GPU. The interpreter truncates fp32 to bf16 and fp8 where every GPU rounds, and
makes a number of an fp8 NaN, so those conversions are replaced here.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

from codetta.backends.calls import REFERENCE
from codetta.language.program import Program
from codetta.language.types import Kind

pytest.importorskip("triton", reason="generated kernels need Triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip(
        "no GPU; test_triton_interpreter.py runs this file in Triton's interpreter",
        allow_module_level=True,
    )
DEVICE = "cpu" if INTERPRETED else "cuda"
#: fp32, against the largest element: hardware functions on a GPU are good to some 2^-21.
TOLERANCE = 2e-6 if INTERPRETED else 2e-5


def _round_like_a_gpu() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float
    narrow = {
        tl.bfloat16: (torch.bfloat16, "uint16"),
        tl.float8e4nv: (torch.float8_e4m3fn, "uint8"),
        tl.float8e5: (torch.float8_e5m2, "uint8"),
    }

    def convert(data, given, wanted, rounding):
        if given in narrow and wanted == tl.float32:
            bits = torch.from_numpy(data.copy())
            return bits.view(narrow[given][0]).float().numpy().view("uint32").reshape(data.shape)
        if given != tl.float32 or wanted not in narrow:
            return original(data, given, wanted, rounding)
        dtype, bits = narrow[wanted]
        rounded = torch.from_numpy(data.copy()).to(dtype)
        return rounded.view(getattr(torch, bits)).numpy().reshape(data.shape)

    interpreter._convert_float = convert


if INTERPRETED:
    _round_like_a_gpu()
    np.seterr(all="ignore")  # masked elements divide by zero and overflow, too


# ------------------------------------------------------------------------------------ inputs
def compute_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def inputs(
    program: Program, m: int, n: int, dtype: torch.dtype, strided: bool = False, seed: int = 0
) -> list[Tensor]:
    """Random operands in the flat order of the operators; ``strided``: column by column."""
    g = torch.Generator().manual_seed(seed + 31 * m + n)
    wide = compute_of(dtype)

    def random(*shape: int, dtype: torch.dtype) -> Tensor:
        x = torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).to(DEVICE)
        return x.t().contiguous().t() if strided else x

    found: list[Tensor] = []
    for o in program.operands:
        cols = int(n * o.width)
        if o.kind is Kind.TILE:
            found.append(random(m, cols, dtype=dtype))
        elif o.kind is Kind.ROW:
            found.append(random(1, cols, dtype=wide))
        elif o.kind is Kind.COL:
            found.append(random(m, 2 if strided else 1, dtype=wide)[:, :1].abs() + 0.5)
        elif o.kind is Kind.SCALAR:
            found.append(random(1, 1, dtype=wide).abs() + 1)
        elif o.kind is Kind.INDEX:
            found.append(torch.randint(-2, n + 2, (m, 1), generator=g).to(DEVICE))
        else:
            half = max(x.attr("rotary_dim") for x in program.nodes if x.op == "rotate") // 2
            angle = random(11, half, dtype=wide)
            found.append(torch.cat((angle.cos(), angle.sin()), dim=1))
            found.append(torch.randint(0, 11, (m,), generator=g).to(DEVICE))
    return found


# ------------------------------------------------------------------------------ comparison
def agree(got: Tensor, expected: Tensor, what: str = "") -> None:
    """Same shape, dtype and masks; fp32 to TOLERANCE of the largest, narrower to a unit more."""
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    assert got.dtype is expected.dtype, (what, got.dtype, expected.dtype)
    a, b = got.double(), expected.double()
    for mask in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(mask(a), mask(b)), f"{what}: masks of {mask.__name__} differ"
    finite = torch.isfinite(b)
    a, b = a[finite], b[finite]
    if not b.numel():
        return
    tolerance = 1e-12 if got.dtype is torch.float64 else TOLERANCE
    unit = torch.finfo(got.dtype).eps if got.element_size() <= 2 else tolerance
    allowed = 1.01 * unit * b.abs() + tolerance * b.abs().max().clamp(min=0.25)
    worst = ((a - b).abs() - allowed).max()
    assert worst <= 0, (
        f"{what}: {float(worst):.3e} beyond the tolerance, max {float(b.abs().max())}"
    )


def check(
    program: Program, operands: list[Tensor], m: int, n: int, dtype: torch.dtype,
    tile: tuple[int, int] | None = None, raw: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Assert that the generated kernels return what the reference returns; returns that."""
    from codetta.backends.cuda.triton_kernels import pointwise

    arguments = (program, operands, m, n, dtype, compute_of(dtype), tile, raw)
    got, expected = pointwise(*arguments), REFERENCE.pointwise(*arguments)
    assert len(got) == len(expected)
    for k, (x, y) in enumerate(zip(got, expected, strict=True)):
        agree(x, y, f"{program.name}, output {k}, {m} x {n}")
    return got


def fitting(program: Program, n: int) -> int:
    """n, or the next multiple of the program's granule."""
    return -(-n // program.granule) * program.granule
