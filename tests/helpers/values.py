"""The one check of values: any program, on whatever backend is chosen, against fp64."""

from __future__ import annotations

import torch
from torch import Tensor

import codetta
from codetta.backends.layout import compute_dtype, results
from codetta.language.types import Kind
from helpers.budget import norm, within_budget
from helpers.cases import inputs
from helpers.oracle import execution, last_addends, run


def as_dict(program, out) -> dict[str, Tensor]:
    """Outputs by name."""
    if isinstance(out, Tensor):
        return {program.outputs[0].name: out}
    return out._asdict()


def flat(out) -> list[Tensor]:
    """All tensors of a result, the components of raw partials too."""
    if isinstance(out, Tensor):
        return [out]
    return [x for part in out for x in flat(part)]


def check_values(program, a, b, operands, tile=None) -> dict[str, Tensor]:
    """Call the program and judge it: within the budget of the fp64 oracle; shapes and dtypes as
    documented. Returns the outputs by name.

    Reductions of rounded values are judged by the oracle that rounds there too, since that is what
    they are of: without it, a single number would be judged by how lucky eager's roundings were.
    """
    out = as_dict(program, codetta.gemm(a, b, program, tile=tile, **operands))
    exact = run(program, a, b, operands, torch.float64).outputs
    eager = run(program, a, b, operands, a.dtype).outputs
    exact |= _of_rounded(program, a, b, operands)
    wide = compute_dtype(a.dtype, [x for x in operands.values() if isinstance(x, Tensor)])
    assert list(out) == [o.name for o in program.outputs]
    for o, result in zip(program.outputs, results(program), strict=True):
        type_, got = program.nodes[o.node].type, out[o.name]
        lead = tuple(a.shape[:-1]) if type_.has_rows else ()
        cols = (int(b.shape[1] * type_.cols),) if type_.has_cols else ()
        assert tuple(got.shape) == lead + cols
        assert got.dtype == result.storage(a.dtype, wide)
        addends = last_addends(program, o.name, a, b, operands)
        within_budget(o.name, got, exact[o.name], eager[o.name], addends)
    return out


def check_rounded(program, a, b, operands, out: dict[str, Tensor]) -> None:
    """Reductions of rounded values are of the values as rounded, to more than their 16 bits.

    A value next to a tie may be rounded the other way by a kernel, so one in a hundred addends may
    be off by an ulp.
    """
    for name, ref in _of_rounded(program, a, b, operands).items():
        error = norm(out[name].double().reshape(ref.shape) - ref)
        assert error <= 0.01 * torch.finfo(a.dtype).eps * norm(ref), (
            f"{name} is not of rounded values"
        )


def _of_rounded(program, a, b, operands) -> dict[str, Tensor]:
    """Finals behind a ``round_to``, computed in fp64 and rounded where the program says so."""
    behind = [
        o.name
        for o in program.finals
        if any(program.nodes[i].op == "round_to" for i in program.reachable(o.node))
    ]
    if not behind:
        return {}
    outputs, _ = execution(program, a, b, operands, torch.float64)
    return {name: outputs[name] for name in behind}


def call_of(program, shape, dtype, layout="plain", seed=0):
    """a, b and operands for (M, at least N, K), vectors and tables in fp32 as the library makes
    them, every array in the named layout."""
    m, n, k = shape
    a, b, operands = inputs(program, (m,), -(-n // program.granule), k, dtype, seed)
    for o in program.operands:
        x = operands[o.name]
        if o.kind is Kind.ROTARY:
            operands[o.name] = (x[0].float(), x[1])
        elif o.kind in (Kind.ROW, Kind.COL, Kind.SCALAR):
            operands[o.name] = x.float()
    if "lse" in operands:  # with another one exp(z - lse) is no probability, and drowns the target
        operands["lse"] = torch.logsumexp((a.float() @ b.float()) * operands["r"][:, None], 1)
    place = LAYOUTS[layout]
    operands = {n: place(x) if isinstance(x, Tensor) else x for n, x in operands.items()}
    return place(a), place(b), operands


# ------------------------------------------------------------------------------------- layouts
def plain(x: Tensor) -> Tensor:
    return x


def transposed(x: Tensor) -> Tensor:
    """The rows are contiguous instead of the columns."""
    return x.mT.contiguous().mT if x.ndim > 1 else x


def within(x: Tensor, before: int, after: int) -> Tensor:
    """x in the middle of NaN (or of indices that select nothing), ``before`` elements in."""
    nothing = float("nan") if x.is_floating_point() else -(2**40)
    memory = x.new_full([s + before + after for s in x.shape], nothing)
    view = memory[tuple(slice(before, before + s) for s in x.shape)]
    return view.copy_(x)


def pitched(x: Tensor) -> Tensor:
    """Aligned as the kernel reads it in place, among NaN."""
    return within(x, 16, 16 + -x.shape[-1] % 16 if x.ndim else 16)


def shifted(x: Tensor) -> Tensor:
    """No pointer and no pitch aligned, among NaN."""
    return within(x, 1, 2)


def spread(x: Tensor) -> Tensor:
    """Every second element of NaN."""
    memory = x.new_full(
        (*x.shape[:-1], 2 * x.shape[-1]), float("nan" if x.is_floating_point() else 7)
    )
    return memory[..., ::2].copy_(x)


def expanded(x: Tensor) -> Tensor:
    """One column (or number) for all: stride 0. Other values than x's."""
    return x[..., :1].expand(x.shape)


LAYOUTS = {f.__name__: f for f in (plain, transposed, pitched, shifted, spread, expanded)}
