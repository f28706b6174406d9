"""``codetta.gemm``: a GEMM and the program that runs on each of its output tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from codetta.arguments import (
    CallSpec,
    call_spec,
    canonical_operands,
    check_columns,
    check_matrices,
    check_tensor,
    check_tile,
    checked_text,
)
from codetta.autograd import Gemm, first_requiring_grad, refuse_transforms
from codetta.backends.layout import parsed
from codetta.backends.select import backend_for
from codetta.backends.watched import is_watched
from codetta.checked import Checked, known, remember
from codetta.errors import (
    BadAttribute,
    BadOut,
    BadRank,
    DeviceMismatch,
    OutNeedsNoGrad,
    RawNeedsNoGrad,
    UnsupportedDtype,
)
from codetta.language.program import Program
from codetta.ops import IDENTITY, run_gemm, run_gemm_accumulate_
from codetta.ops.library import GEMM
from codetta.returns import Shaping, check_no_overlap, check_out, shaped, shaping, write


def gemm(
    a: Tensor,
    b: Tensor,
    epilogue: Program | None = None,
    *,
    tile: tuple[int, int] | None = None,
    out: Tensor | dict[str, Tensor] | None = None,
    raw: bool = False,
    **operands: Any,
) -> Any:
    """epilogue(a @ b, **operands), in one pass over the output tiles.

    Args:
        a: (..., K), any strides, any number of rows; fp32, bf16, fp16 or fp64, or fp8 without
            autograd. A vector (K,) is one row.
        b: (K, N), of a's dtype; of fp8, at most one may be e5m2. A weight in nn.Linear layout (N,
            K) goes in as ``w.t()``, which is also what fp8 kernels read without a copy.
        epilogue: a Program; without one the result is a @ b, rounded once to a's dtype (to bf16
            where a is fp8).
        tile: (tile_m, tile_n) into which the output is cut. Results do not depend on it beyond the
            order of summation; the shapes of raw partials do.
        out: a tensor to write the result into, or a dict from output name to tensor; without
            autograd, and sharing no memory with an input.
        raw: return, in place of each reduced output, the partials it is finalized from.
        operands: one per operand of the program, by name, with lead = a.shape[:-1]:
            Tile (*lead, w N) for width w; Row (w N,); Col and Index (*lead,) or (*lead, 1); Scalar
            a Python number or a tensor with one element; Rotary a tuple of a table (P, rotary_dim)
            laid out [cos | sin], see :func:`rotary_table`, and integer positions broadcastable to
            lead. The accumulator, and so all arithmetic, is fp32, or fp64 if a or an operand is.

    Returns:
        A tensor if the program returns a single value, else a named tuple of its outputs: stores
        (*lead, w N) in the dtype of the store, reductions over columns (*lead,), over rows (w N,),
        over both (), in the accumulator's dtype.

        With ``raw``, a named tuple of the stores and, in place of the reductions, of the partials
        as named by ``Program.partial_names``: an output that one reduction feeds keeps its name,
        one that k feed has ``name_0`` to ``name_{k-1}``, shared ones appear once. A partial is a
        tensor if its state is one number, else a named tuple of components: count, mean, m2
        (Chan); max, sum (log-sum-exp); max, sum, payload. With T tiles over columns and S over
        rows each is (*lead, T), (S, w N) or (S, T), in the accumulator's dtype. A bare program
        with a single entry returns that entry.

    Differentiable in a, b and all Tile, Row, Col and Scalar operands; gradients have the dtype and
    shape of the inputs. Only what needs a gradient is computed. Under ``torch.autocast`` a and b
    are cast as for torch.matmul, the operands are not. ``torch.compile(fullgraph=True)`` sees one
    operator.

    Raises:
        CallError: a subclass per mistake, before anything runs; see :mod:`codetta.errors`.
    """
    program = IDENTITY if epilogue is None else epilogue
    text = checked_text(program)
    spec = _spec(text)
    warm = not torch.compiler.is_dynamo_compiling() and out is None
    if warm and (call := known(spec, a, b, tile, raw, operands)) and not is_watched(a, b):
        return _again(call, program, text, a, b, tile, raw, operands)
    given = a, b
    check_tensor("a", a)
    check_tensor("b", b)
    a, b = _autocast(a, b)
    check_matrices(a, b)
    check_columns(spec, b.shape[1])
    if tile is not None:
        check_tile(spec, tile)
    lead = a.shape[:-1]
    m = 1
    for size in lead:
        m = m * size
    flat = canonical_operands(spec, a, b, m, operands)
    if a.ndim != 2:
        a = a.reshape(m, a.shape[-1])
    if out is not None:
        _check_out(program, out, raw, a, b, flat, lead, operands)
    values = shaped(_run(program, spec, a, b, flat, tile, raw, operands), _shaping(text, raw), lead)
    if warm:
        remember(spec, *given, tile, raw, operands, _shaping(text, raw))
    return values if out is None else write(out, values)


def gemm_accumulate_(target: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """target += a @ b, in place; returns target. The only function that mutates an argument.

    The product is accumulated in the dtype of target or fp32, the wider one, and is not rounded
    before the addition; the sum is rounded once, to target's dtype. So a gradient accumulated in
    fp32 over many calls does not drift. a (M, K), b (K, N), both of one dtype; target (M, N), fp32,
    bf16, fp16 or fp64. Without autograd.

    Raises:
        CallError: shapes, dtypes or devices do not fit, target shares memory with a or b, or
            something requires grad.
    """
    check_matrices(a, b)
    check_tensor("target", target)
    if a.ndim != 2:
        raise BadRank(name="a", given=tuple(a.shape), expected="(M, K)", fix="Reshape it.")
    shape = (a.shape[0], b.shape[1])
    if tuple(target.shape) != shape:
        raise BadRank(
            name="target", given=tuple(target.shape), expected=f"{shape}", fix="It must fit a @ b."
        )
    if not target.dtype.is_floating_point:
        raise UnsupportedDtype(name="target", given=target.dtype, allowed="floating point dtypes")
    if target.device != a.device:
        raise DeviceMismatch(given=f"a on {a.device}, target on {target.device}")
    name = first_requiring_grad((("target", target), ("a", a), ("b", b)))
    if name is not None:
        raise OutNeedsNoGrad(name=name)
    if not torch.compiler.is_dynamo_compiling():
        refuse_transforms([target, a, b])
        check_no_overlap("target", target, (("a", a), ("b", b)))
    run_gemm_accumulate_(target, a, b)
    return target


def rotary_table(
    positions: int | Tensor,
    rotary_dim: int,
    theta: float = 10000.0,
    *,
    scaling: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """[cos(p f_j) | sin(p f_j)] with f_j = theta^(-2j / rotary_dim), j < rotary_dim / 2.

    The table of a Rotary operand (Su et al., arXiv 2104.09864), (positions, rotary_dim). Angles are
    computed in fp64, so that large positions keep their digits.

    Args:
        positions: number of positions, 0, 1, ...; or a vector of positions, one row each.
        scaling: divides the positions (linear position interpolation).

    Raises:
        BadAttribute: rotary_dim is not even and positive.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise BadAttribute(
            op="rotary_table",
            attribute="rotary_dim",
            given=rotary_dim,
            fix="use an even number of at least 2",
        )
    if not isinstance(positions, Tensor):
        positions = torch.arange(positions, device=device)
    p = positions.to(torch.float64).reshape(-1, 1) / scaling
    j = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=p.device)
    angles = p * theta ** (-j / rotary_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)


# ------------------------------------------------------------------------------- running it
def _again(
    call: Checked,
    program: Program,
    text: str,
    a: Tensor,
    b: Tensor,
    tile: tuple[int, int] | None,
    raw: bool,
    operands: dict[str, Any],
) -> Any:
    """A call that agrees with one that has passed all checks."""
    flat = call.views(operands, a, call.m)
    if a.ndim != 2:
        a = a.reshape(call.m, a.shape[-1])
    if torch.autograd.forward_ad._current_level >= 0:
        refuse_transforms([a, b, *flat])
    if torch.is_grad_enabled() and _requires_grad(a, b, flat):
        made = _differentiably(program, a, b, flat, tile, raw, operands)
    else:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            made = backend_for(a).gemm(program, a, b, flat, tile, raw)
    return call.result(made) if call.result else shaped(made, _shaping(text, raw), call.lead)


def _run(
    program: Program,
    spec: CallSpec,
    a: Tensor,
    b: Tensor,
    flat: list[Tensor],
    tile: tuple[int, int] | None,
    raw: bool,
    operands: dict[str, Any],
) -> Any:
    """The flat results. Compiled graphs call the operator; eager calls skip its Autograd kernel."""
    if torch.compiler.is_dynamo_compiling():
        return GEMM(spec.line, a, b, flat, tile or (), raw)
    refuse_transforms([a, b, *flat])
    if torch.is_grad_enabled() and _requires_grad(a, b, flat):
        return _differentiably(program, a, b, flat, tile, raw, operands)
    return run_gemm(program, a, b, flat, tile=tile, raw=raw)


def _requires_grad(a: Tensor, b: Tensor, flat: list[Tensor]) -> bool:
    return a.requires_grad or b.requires_grad or any(x.requires_grad for x in flat)


def _differentiably(
    program: Program,
    a: Tensor,
    b: Tensor,
    flat: list[Tensor],
    tile: tuple[int, int] | None,
    raw: bool,
    operands: dict[str, Any],
) -> Any:
    if raw:
        raise RawNeedsNoGrad(name=first_requiring_grad(_named_tensors(a, b, operands)))
    return Gemm.apply(program, tile, a, b, *flat)


def _check_out(
    program: Program,
    out: Any,
    raw: bool,
    a: Tensor,
    b: Tensor,
    flat: list[Tensor],
    lead: torch.Size,
    operands: dict[str, Any],
) -> None:
    if raw:
        raise BadOut(what="...", reason="raw=True returns partials, which it does not take")
    inputs = _named_tensors(a, b, operands)
    name = first_requiring_grad(inputs)
    if name is not None:
        raise OutNeedsNoGrad(name=name)
    if not torch.compiler.is_dynamo_compiling():
        check_out(program, out, a, b.shape[1], flat, lead, inputs)


def _named_tensors(a: Tensor, b: Tensor, operands: dict[str, Any]) -> list[tuple[str, Tensor]]:
    named = [("a", a), ("b", b)]
    for name, value in operands.items():
        parts = value if isinstance(value, tuple | list) else (value,)
        named += [(name, x) for x in parts if isinstance(x, Tensor)]
    return named


def _autocast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a and b as torch.matmul sees them under torch.autocast: floats, save fp64, are cast. fp8 is
    not: who quantized a matrix means it."""
    device = a.device.type
    if not (_has_autocast(device) and torch.is_autocast_enabled(device)):
        return a, b
    dtype = torch.get_autocast_dtype(device)
    return _cast(a, dtype), _cast(b, dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    cast = x.is_floating_point() and x.dtype is not torch.float64 and x.dtype.itemsize > 1
    return x.to(dtype) if cast else x


# Dynamo must not trace into the language: it calls these at trace time and takes what they return
# as a constant, guarded by the text of the program. (torch.compiler.assume_constant_result sets
# the same mark, but imports all of Dynamo to do so.)
def _spec(text: str) -> CallSpec:
    return call_spec(parsed(text))


def _shaping(text: str, raw: bool) -> Shaping:
    return shaping(parsed(text), raw)


def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


for _function in (_spec, _shaping, _has_autocast):
    setattr(_function, "_dynamo_marked_constant", True)  # noqa: B010
