"""Calling ``codetta.gemm`` or a program: operands, shapes, dtypes, options."""

from __future__ import annotations

from codetta.errors.base import CodettaError


class CallError(CodettaError):
    """A call of ``codetta.gemm`` or of a program was refused before anything ran."""


class NotAProgram(CallError, TypeError):
    template = (
        "the epilogue of codetta.gemm must be a Program; it is {given}. Decorate the function "
        "with @codetta.epilogue."
    )
    wrong = "codetta.gemm(a, b, lambda acc: acc * 2)"
    right = "codetta.gemm(a, b, codetta.epilogue(lambda acc: acc * 2.0))"


class NotATensor(CallError, TypeError):
    template = "{name} must be a torch.Tensor; it is {given}. {fix}"
    wrong = "codetta.gemm([[1.0, 2.0]], b)"
    right = "codetta.gemm(a, b)"


class UnsupportedTensor(CallError, TypeError):
    template = "{name} is a {given}. codetta works on plain strided tensors of local data; {fix}."
    wrong = "codetta.gemm(a.to_sparse(), b)"
    right = "codetta.gemm(a, b)"


class BadRank(CallError, ValueError):
    template = "{name} has shape {given}; expected {expected}. {fix}"
    wrong = "codetta.gemm(a, b[None])"
    right = "codetta.gemm(a, b)"


class InnerMismatch(CallError, ValueError):
    template = (
        "a of shape {a} and b of shape {b} do not multiply: a's last dimension is {ka}, b's first "
        "is {kb}. b is (K, N) as in a @ b; a weight in nn.Linear layout (N, K) goes in as `w.t()`."
    )
    wrong = "codetta.gemm(a, b.t())"
    right = "codetta.gemm(a, b)"


class UnsupportedDtype(CallError, TypeError):
    template = "{name} has dtype {given}; allowed are {allowed}. Convert it with .to(...)."
    wrong = "codetta.gemm(a.to(torch.int32), b.to(torch.int32))"
    right = "codetta.gemm(a, b)"


class DtypeMismatch(CallError, TypeError):
    template = (
        "a has dtype {a} and b has dtype {b}. As in torch.matmul both must be equal: convert one "
        "with .to(...), or run under torch.autocast, which casts both."
    )
    wrong = "codetta.gemm(a, b.double())"
    right = "codetta.gemm(a, b)"


class Fp8Pair(CallError, TypeError):
    template = (
        "a has dtype {a} and b has dtype {b}. The fp8 products are float8_e4m3fn x float8_e4m3fn, "
        "float8_e5m2 x float8_e4m3fn and float8_e4m3fn x float8_e5m2: quantize the other operand, "
        "or convert the fp8 one with .to(...)."
    )
    wrong = "codetta.gemm(a.to(torch.float8_e4m3fn), b)"
    right = "codetta.gemm(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn))"


class DeviceMismatch(CallError, ValueError):
    template = "the tensors of one call lie on different devices: {given}. Move them to one device."
    wrong = "codetta.gemm(a, b.to('meta'))"
    right = "codetta.gemm(a, b)"


class MissingOperand(CallError, TypeError):
    template = "program {program!r} needs the operands {missing}, which were not given: {signature}"
    wrong = "codetta.gemm(a, b, codetta.programs.row_scale)"
    right = "codetta.gemm(a, b, codetta.programs.row_scale, r=torch.ones(a.shape[0]))"


class UnknownOperand(CallError, TypeError):
    template = "program {program!r} has no operand {unknown}: {signature}"
    wrong = "codetta.gemm(a, b, codetta.programs.identity, residual=a)"
    right = "codetta.gemm(a, b, codetta.programs.identity)"


class OperandShape(CallError, ValueError):
    template = (
        "operand {operand!r} ({kind}) of {program!r} has shape {given}; expected {expected} for "
        "a of shape {a} and b of shape {b}."
    )
    wrong = "codetta.gemm(a, b, codetta.programs.row_scale, r=torch.ones(b.shape[1] + 99))"
    right = "codetta.gemm(a, b, codetta.programs.row_scale, r=torch.ones(a.shape[0]))"


class OperandDtype(CallError, TypeError):
    template = "operand {operand!r} ({kind}) of {program!r} has dtype {given}; expected {expected}."
    wrong = (
        "codetta.gemm(a, b, codetta.programs.row_scale, r=torch.ones(a.shape[0], dtype=torch.long))"
    )
    right = "codetta.gemm(a, b, codetta.programs.row_scale, r=torch.ones(a.shape[0]))"


class PositionOutOfRange(CallError, IndexError):
    template = (
        "the positions of operand {operand!r} of {program!r} run {given}, but its table has "
        "{rows} rows. Make the table longer, as in codetta.rotary_table(max_positions, ...), or "
        "check the positions (they must not be negative)."
    )
    wrong = (
        "p = codetta.programs.row_scale_rotary\n"
        "t = codetta.rotary_table(8, 4)\n"
        "r, pos = torch.ones(a.shape[0]), torch.full((a.shape[0],), 8)\n"
        "codetta.gemm(a, b[:, :4], p(head_dim=4), r=r, rope=(t, pos))"
    )
    right = (
        "p = codetta.programs.row_scale_rotary\n"
        "t = codetta.rotary_table(9, 4)\n"
        "r, pos = torch.ones(a.shape[0]), torch.full((a.shape[0],), 8)\n"
        "codetta.gemm(a, b[:, :4], p(head_dim=4), r=r, rope=(t, pos))"
    )


class TooFewColumns(CallError, ValueError):
    template = (
        "program {program!r} rotates {heads} heads of {head_dim} columns, but its tile has only "
        "{n} columns. Rotate fewer heads, or all there are with heads=-1."
    )
    wrong = (
        "from codetta.language import Rotary, rotate\n"
        "@codetta.epilogue\ndef f(acc, rope: Rotary):\n"
        "    return rotate(acc, rope, head_dim=4, heads=2)\n"
        "t, pos = codetta.rotary_table(8, 4), torch.arange(a.shape[0])\n"
        "codetta.gemm(a, b[:, :4], f, rope=(t, pos))"
    )
    right = (
        "from codetta.language import Rotary, rotate\n"
        "@codetta.epilogue\ndef f(acc, rope: Rotary):\n"
        "    return rotate(acc, rope, head_dim=4, heads=1)\n"
        "t, pos = codetta.rotary_table(8, 4), torch.arange(a.shape[0])\n"
        "codetta.gemm(a, b[:, :4], f, rope=(t, pos))"
    )


class NotDivisible(CallError, ValueError):
    template = (
        "program {program!r} needs N to be a multiple of {granule} ({reason}); N is {n}. "
        "Change the weight's number of rows, or the program's pairs or group size."
    )
    wrong = "codetta.gemm(a, b[:, :3], codetta.programs.swiglu)"
    right = "codetta.gemm(a, b[:, :4], codetta.programs.swiglu)"


class BadTile(CallError, ValueError):
    template = (
        "tile={given} cannot be used with program {program!r}: {reason}. Give tile=(tile_m, "
        "tile_n) of positive integers with tile_n a multiple of {granule}, or leave it out."
    )
    wrong = "codetta.gemm(a, b[:, :4], codetta.programs.swiglu, tile=(8, 3))"
    right = "codetta.gemm(a, b[:, :4], codetta.programs.swiglu, tile=(8, 2))"


class BadOut(CallError, ValueError):
    template = (
        "out={what} cannot be used: {reason}. Give a tensor (or a dict of name to tensor) of the "
        "result's shape, dtype and device that shares no memory with an input."
    )
    wrong = "codetta.gemm(a, b, out=torch.empty(1, 1))"
    right = "codetta.gemm(a, b, out=torch.empty(a.shape[0], b.shape[1]))"
