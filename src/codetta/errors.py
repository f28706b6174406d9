"""Every mistake a user can make has a class here, and the class carries its own fix.

This module is the one table the code and the documentation share: ``docs/errors.md`` is generated
from it (``python tools/error_page.py``), and the test-suite executes each ``wrong`` snippet and
expects exactly that class, then each ``right`` snippet and expects none.

Two habits keep the messages useful. The template says what was given, what is allowed and how to
fix it; and an error met while tracing an epilogue ends with the line of the author's function, not
with a line of ours.
"""

from __future__ import annotations

from typing import Any, ClassVar


class CodettaError(Exception):
    """Base of all errors raised on purpose by codetta.

    Args:
        where: ``file:line: source`` of the author's code, appended to the message when known.
        fields: the values the class's ``template`` names.
    """

    template: ClassVar[str] = "{message}"
    wrong: ClassVar[str] = ""
    right: ClassVar[str] = ""

    def __init__(self, where: str | None = None, **fields: Any) -> None:
        self.where = where
        self.fields = fields
        message = self.template.format(**fields)
        super().__init__(message if where is None else f"{message}\n  at {where}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.where, self.fields))


def _rebuild(cls: type[CodettaError], where: str | None, fields: dict[str, Any]) -> CodettaError:
    return cls(where, **fields)


def catalogue() -> list[type[CodettaError]]:
    """All concrete error classes of this module, in the order in which they are defined."""
    found: list[type[CodettaError]] = []

    def visit(cls: type[CodettaError]) -> None:
        for sub in cls.__subclasses__():
            ours = sub.__module__ == __name__
            if ours and "template" in sub.__dict__ and sub not in found:
                found.append(sub)
            visit(sub)

    visit(CodettaError)
    return found


# ------------------------------------------------------------------------ writing an epilogue
class EpilogueError(CodettaError):
    """A function given to ``@codetta.epilogue`` cannot become a Program."""


class MissingAccumulator(EpilogueError, TypeError):
    template = (
        "the first parameter of epilogue {name!r} must be called `acc` (the accumulator tile); "
        "it is {given}. Write `def {name}(acc, ...)`."
    )
    wrong = "@codetta.epilogue\ndef f(x, r: Col):\n    return x * r"
    right = "@codetta.epilogue\ndef f(acc, r: Col):\n    return acc * r"


class MissingAnnotation(EpilogueError, TypeError):
    template = (
        "operand {operand!r} of epilogue {name!r} has no annotation. Operand kinds are declared, "
        "never guessed from shapes: annotate it with one of {allowed}."
    )
    wrong = "@codetta.epilogue\ndef f(acc, r):\n    return acc * r"
    right = "@codetta.epilogue\ndef f(acc, r: Col):\n    return acc * r"


class UnknownAnnotation(EpilogueError, TypeError):
    template = (
        "operand {operand!r} of epilogue {name!r} is annotated with {given}, which is no operand "
        "kind. Use one of {allowed} (from codetta.language)."
    )
    wrong = "@codetta.epilogue\ndef f(acc, r: int):\n    return acc * r"
    right = "@codetta.epilogue\ndef f(acc, r: Scalar):\n    return acc * r"


class ReservedName(EpilogueError, ValueError):
    template = (
        "{what} {given!r} in {name!r} is not allowed: names must be identifiers, must not start "
        "with `_`, `d_` or `saved_` (gradients and saved values use these), and must not be one "
        "of {reserved}. Rename it."
    )
    wrong = "@codetta.epilogue\ndef f(acc, tile: Tile):\n    return acc + tile"
    right = "@codetta.epilogue\ndef f(acc, residual: Tile):\n    return acc + residual"


class UnusedOperand(EpilogueError, ValueError):
    template = (
        "operand {operand!r} of {name!r} does not reach any output, yet it would be loaded. "
        "Use it or remove it."
    )
    wrong = "@codetta.epilogue\ndef f(acc, r: Col):\n    return acc * 2.0"
    right = "@codetta.epilogue\ndef f(acc):\n    return acc * 2.0"


class NoOutputs(EpilogueError, ValueError):
    template = (
        "epilogue {name!r} returned {given}. Return one value, or a dict of name to value with at "
        "least one entry."
    )
    wrong = "@codetta.epilogue\ndef f(acc):\n    acc * 2.0"
    right = "@codetta.epilogue\ndef f(acc):\n    return acc * 2.0"


class BadOutput(EpilogueError, TypeError):
    template = (
        "output {output!r} of {name!r} is {given}. An output is a tile (stored) or a reduction of "
        "one (rowsum, colsum, logsumexp, ...); {fix}."
    )
    wrong = "@codetta.epilogue\ndef f(acc, r: Col):\n    return {'x': acc * r, 'r': r * 2.0}"
    right = "@codetta.epilogue\ndef f(acc, r: Col):\n    return {'x': acc * r}"


class DataDependentBranch(EpilogueError, TypeError):
    template = (
        "a traced value has no truth value or number: the function is traced once, for all "
        "elements ({what}). Use where(condition, a, b), minimum or maximum instead."
    )
    wrong = "@codetta.epilogue\ndef f(acc):\n    return acc if acc > 0 else acc * 0.0"
    right = "@codetta.epilogue\ndef f(acc):\n    return where(acc > 0, acc, acc * 0.0)"


class ForeignFunction(EpilogueError, TypeError):
    template = (
        "{function} cannot be applied to a traced value: programs are made of codetta.language "
        "primitives only. Use {fix}."
    )
    wrong = "@codetta.epilogue\ndef f(acc):\n    return torch.exp(acc)"
    right = "@codetta.epilogue\ndef f(acc):\n    return exp(acc)"


class ForeignValue(EpilogueError, TypeError):
    template = (
        "{given} cannot be combined with a traced value. Allowed are Python numbers and values of "
        "the same trace; a tensor must come in as an annotated operand."
    )
    wrong = "c = torch.ones(3)\n@codetta.epilogue\ndef f(acc):\n    return acc * c"
    right = "@codetta.epilogue\ndef f(acc, c: Row):\n    return acc * c"


class NotIterable(EpilogueError, TypeError):
    template = (
        "a traced value cannot be iterated, indexed or measured ({what}). Pairs are taken apart "
        "with unpack(value, pairs), groups with group_sum(value, size)."
    )
    wrong = "@codetta.epilogue\ndef f(acc):\n    g, u = acc\n    return g * u"
    right = "@codetta.epilogue\ndef f(acc):\n    g, u = unpack(acc)\n    return g * u"


class WidthMismatch(EpilogueError, ValueError):
    template = (
        "{op} combines values of different widths: {given}. Widths are multiples of the "
        "accumulator's N; bring both to one width with pack, unpack, group_sum or ungroup, or "
        "declare the operand with that width, as in Tile(width=2)."
    )
    wrong = "@codetta.epilogue\ndef f(acc, c: Tile):\n    g, u = unpack(acc)\n    return g * u + c"
    right = (
        "@codetta.epilogue\ndef f(acc, c: Tile(width=0.5)):\n"
        "    g, u = unpack(acc)\n    return g * u + c"
    )


class LayoutMismatch(EpilogueError, ValueError):
    template = (
        "{op} combines values of different pair layouts: {given}. They would lie in different "
        "tiles; use one layout throughout."
    )
    wrong = (
        "@codetta.epilogue\ndef f(acc):\n    g, u = unpack(acc, 'adjacent')\n"
        "    a, b = unpack(acc, 'halves')\n    return g * b"
    )
    right = "@codetta.epilogue\ndef f(acc):\n    g, u = unpack(acc, 'adjacent')\n    return g * u"


class BadPairLayout(EpilogueError, ValueError):
    template = (
        "{given!r} is no pair layout. Use 'adjacent' (columns 2j and 2j+1), 'halves' (j and "
        "j + N/2) or 'halves:H' (j and j + H/2 within each head of H columns, H even)."
    )
    wrong = (
        "@codetta.epilogue\ndef f(acc):\n    g, u = unpack(acc, 'interleaved')\n    return g * u"
    )
    right = "@codetta.epilogue\ndef f(acc):\n    g, u = unpack(acc, 'adjacent')\n    return g * u"


class BadGroup(EpilogueError, ValueError):
    template = "{op} with {given} is not possible: {reason}. {fix}"
    wrong = "@codetta.epilogue\ndef f(acc):\n    return group_sum(acc, 0)"
    right = "@codetta.epilogue\ndef f(acc):\n    return group_sum(acc, 4)"


class ReducedValueInTile(EpilogueError, ValueError):
    template = (
        "{op} uses the result of a reduction together with a tile: {given}. A row or column is "
        "spread over many tiles, so its reduction is known only after the last of them. Return the "
        "reduction as an output and hand it to the GEMM that consumes the tile as a Col, Row or "
        "Scalar operand (a row scale commutes with the next GEMM)."
    )
    wrong = "@codetta.epilogue\ndef f(acc):\n    return acc * rsqrt(rowsum(acc * acc))"
    right = "@codetta.epilogue\ndef f(acc):\n    return {'x': acc, 'r': rsqrt(rowsum(acc * acc))}"


class MixedReductions(EpilogueError, ValueError):
    template = (
        "{op} combines a reduction over rows with a reduction over columns: {given}. Return them "
        "as two outputs."
    )
    wrong = "@codetta.epilogue\ndef f(acc):\n    return {'s': rowsum(acc) + colsum(acc)}"
    right = "@codetta.epilogue\ndef f(acc):\n    return {'s': rowsum(acc), 't': colsum(acc)}"


class BadReduction(EpilogueError, ValueError):
    template = "{op} reduces tiles, it was given {given}. {fix}"
    wrong = "@codetta.epilogue\ndef f(acc, r: Col):\n    return {'x': acc, 's': rowsum(r)}"
    right = "@codetta.epilogue\ndef f(acc, r: Col):\n    return {'x': acc, 's': rowsum(acc * r)}"


class BooleanValue(EpilogueError, TypeError):
    template = (
        "{op} needs {needed}, it was given {given}. A comparison is the condition of "
        "where(condition, a, b): write where(condition, 1.0, 0.0) for a number."
    )
    wrong = "@codetta.epilogue\ndef f(acc):\n    return acc * (acc > 0)"
    right = "@codetta.epilogue\ndef f(acc):\n    return acc * where(acc > 0, 1.0, 0.0)"


class WrongOperandKind(EpilogueError, TypeError):
    template = "{op} cannot take {given}: {fix}."
    wrong = "@codetta.epilogue\ndef f(acc, i: Index):\n    return acc * i"
    right = "@codetta.epilogue\ndef f(acc, i: Index):\n    return {'x': acc, 't': select(acc, i)}"


class BadAttribute(EpilogueError, ValueError):
    template = "{op} was given {attribute}={given!r}: {fix}."
    wrong = "@codetta.epilogue\ndef f(acc):\n    return round_to(acc, 'half')"
    right = "@codetta.epilogue\ndef f(acc):\n    return round_to(acc, 'fp16')"


class MissingRule(CodettaError, LookupError):
    template = (
        "primitive {primitive!r} has no entry in the table {table!r}. Add one with "
        "`@{table}.rule({primitive!r})` in {module}."
    )
    wrong = "codetta.language.primitives.MEANING['frobnicate']"
    right = "codetta.language.primitives.MEANING['add']"


class ProgramSyntax(CodettaError, ValueError):
    template = "line {line} of the program text cannot be read: {text!r}. {expected}"
    wrong = "codetta.Program.parse('program f(acc) {\\n  %0 = acc(\\n}')"
    right = "codetta.Program.parse(str(codetta.programs.identity))"


# ------------------------------------------------------------------------------ calling gemm
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


class OutNeedsNoGrad(CallError, RuntimeError):
    template = (
        "out= and gemm_accumulate_ write into a tensor and have no autograd, but {name} requires "
        "grad. Call it under torch.no_grad(), or leave out= away."
    )
    wrong = "codetta.gemm(a.requires_grad_(), b, out=torch.empty(a.shape[0], b.shape[1]))"
    right = (
        "with torch.no_grad():\n"
        "    codetta.gemm(a.requires_grad_(), b, out=torch.empty(a.shape[0], b.shape[1]))"
    )


class RawNeedsNoGrad(CallError, RuntimeError):
    template = (
        "raw=True returns partials, which have no derivative, but {name} requires grad. Call it "
        "under torch.no_grad(), or leave raw=True away and differentiate the finals."
    )
    wrong = "codetta.gemm(a.requires_grad_(), b, raw=True)"
    right = "with torch.no_grad():\n    codetta.gemm(a.requires_grad_(), b, raw=True)"


class NotDifferentiable(CallError, RuntimeError):
    template = (
        "operand {operand!r} ({kind}) of {program!r} requires grad, but no gradient is defined "
        "for it. Detach it."
    )
    wrong = (
        "p = codetta.programs.row_scale_rotary\n"
        "t = codetta.rotary_table(8, 4).requires_grad_()\n"
        "r, pos = torch.ones(a.shape[0]), torch.zeros(a.shape[0], dtype=torch.long)\n"
        "codetta.gemm(a, b[:, :4], p(head_dim=4), r=r, rope=(t, pos))"
    )
    right = (
        "p = codetta.programs.row_scale_rotary\n"
        "t = codetta.rotary_table(8, 4)\n"
        "r, pos = torch.ones(a.shape[0]), torch.zeros(a.shape[0], dtype=torch.long)\n"
        "codetta.gemm(a, b[:, :4], p(head_dim=4), r=r, rope=(t, pos))"
    )


class Fp8NeedsNoGrad(CallError, RuntimeError):
    template = (
        "program {program!r} runs with {what}, through which no gradient is defined, but {name} "
        "requires grad. Call it under torch.no_grad() or detach {name}; for a gradient, write the "
        "autograd.Function of your fp8 recipe around such calls."
    )
    wrong = (
        "p, sa, sb = codetta.programs.fp8_scaled, torch.ones(a.shape[0]), torch.ones(b.shape[1])\n"
        "x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)\n"
        "codetta.gemm(x.requires_grad_(), y, p, sa=sa, sb=sb)"
    )
    right = (
        "p, sa, sb = codetta.programs.fp8_scaled, torch.ones(a.shape[0]), torch.ones(b.shape[1])\n"
        "x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)\n"
        "codetta.gemm(x, y, p, sa=sa, sb=sb)"
    )


class DoubleBackward(CallError, RuntimeError):
    template = (
        "codetta defines first derivatives only; the backward of {program!r} was itself to be "
        "differentiated (create_graph=True). For second derivatives use the plain PyTorch formula."
    )
    wrong = (
        "x = a.requires_grad_()\n"
        "g, = torch.autograd.grad(codetta.gemm(x, b).pow(2).sum(), x, create_graph=True)\n"
        "g.sum().backward()"
    )
    right = "x = a.requires_grad_()\ntorch.autograd.grad(codetta.gemm(x, b).pow(2).sum(), x)"


class TransformRefused(CallError, RuntimeError):
    template = (
        "codetta.gemm does not work under torch.func.{transform}. Fold the mapped dimension into "
        "the leading dimensions of a (any number is allowed), or use the plain PyTorch formula."
    )
    wrong = "torch.func.vmap(lambda x: codetta.gemm(x, b))(torch.stack([a, a]))"
    right = "codetta.gemm(torch.stack([a, a]), b)"


class BadProcessGroup(CallError, ValueError):
    template = "process_group= cannot be used: {reason}. {fix}, or leave process_group out."
    wrong = (
        "target = torch.zeros(5, dtype=torch.int64)\n"
        "codetta.linear_cross_entropy(a, b.t(), target, process_group='model')"
    )
    right = (
        "target = torch.zeros(5, dtype=torch.int64)\ncodetta.linear_cross_entropy(a, b.t(), target)"
    )


class UnknownBackend(CallError, ValueError):
    template = "there is no backend {given!r}; choose one of {allowed}."
    wrong = "codetta.use_backend('tpu')"
    right = "with codetta.use_backend('reference'):\n    codetta.gemm(a, b)"


class BackendUnavailable(CallError, RuntimeError):
    template = "backend {given!r} cannot run here: {reason}. {fix}"
    wrong = "with codetta.use_backend('cuda'):\n    codetta.gemm(a, b)"
    right = "with codetta.use_backend('auto'):\n    codetta.gemm(a, b)"


class ColdCapture(CallError, RuntimeError):
    template = (
        "a kernel of program {program!r} is not compiled yet, and a CUDA graph is being captured, "
        "which compiling would break. Run the step once with the same inputs before the capture."
    )
    wrong = ""
    right = ""


class NothingToTune(CallError, ValueError):
    template = (
        "{what!r} was run once to see what it launches, and no fused GEMM kernel was among it. "
        "Tune a call on bf16 or fp16 CUDA tensors that runs on the fused backend, or a Program."
    )
    wrong = ""
    right = ""


class TooLarge(CallError, ValueError):
    template = (
        "program {program!r} was called with {given}; the fused kernels count rows and columns in "
        "32 bits, 2147418112 at most. Cut the rows (or the weight) into several calls, or use the "
        "reference backend."
    )
    wrong = ""
    right = ""


# ------------------------------------------------------------------------------------- the loss
class LossArguments(CallError, ValueError):
    template = "{first} and {second} exclude each other: {reason}. {fix}"
    wrong = (
        "t = torch.zeros(5, dtype=torch.long)\n"
        "codetta.linear_cross_entropy(a, b.t(), t, reduction='sum', num_items_in_batch=8)"
    )
    right = (
        "t = torch.zeros(5, dtype=torch.long)\n"
        "codetta.linear_cross_entropy(a, b.t(), t, num_items_in_batch=8)"
    )


class LossDtypes(CallError, TypeError):
    template = (
        "x has dtype {x} and {name} has dtype {given}. As in torch.nn.functional.linear they must "
        "be equal: convert one with .to(...), or run under torch.autocast, which casts them."
    )
    wrong = "codetta.linear_cross_entropy(a, b.t().double(), torch.zeros(5, dtype=torch.long))"
    right = "codetta.linear_cross_entropy(a, b.t(), torch.zeros(5, dtype=torch.long))"


class TargetOutOfRange(CallError, IndexError):
    template = (
        "{count} targets lie outside the vocabulary [0, {size}), the first is {given} at position "
        "{at}. Set those that do not count to ignore_index (-100), and check that the weight has "
        "a row for every token of the tokenizer."
    )
    wrong = "codetta.linear_cross_entropy(a, b.t(), torch.full((5,), 6))"
    right = "codetta.linear_cross_entropy(a, b.t(), torch.full((5,), 5))"


# ------------------------------------------------------------------------------------- plans
class PlanError(CodettaError):
    """A Plan was built, rewritten or run in a way that its algebra does not allow."""


class PlanShape(PlanError, ValueError):
    template = "{op} in plan {plan!r} cannot combine {given}: {reason}."
    wrong = "p = codetta.plan.PlanBuilder('f')\np.mm(p.tile('x', 'M', 4), p.weight('w', 3, 5).t())"
    right = "p = codetta.plan.PlanBuilder('f')\np.mm(p.tile('x', 'M', 4), p.weight('w', 3, 4).t())"


class PlanInput(PlanError, ValueError):
    template = "plan {plan!r} was run with {given}; its inputs are {expected}."
    wrong = (
        "p = codetta.plan.PlanBuilder('f')\n"
        "p.output('z', p.mm(p.tile('x', 'M', 4), p.weight('w', 3, 4).t()))\n"
        "codetta.plan.evaluate(p.build(), x=torch.ones(2, 4))"
    )
    right = (
        "p = codetta.plan.PlanBuilder('f')\n"
        "p.output('z', p.mm(p.tile('x', 'M', 4), p.weight('w', 3, 4).t()))\n"
        "codetta.plan.evaluate(p.build(), x=torch.ones(2, 4), w=torch.ones(3, 4))"
    )


# ------------------------------------------------------------------------------ author tools
class CandidateError(CodettaError):
    """A file given to ``codetta check`` and the other author tools holds no program to judge.

    The examples below are such files.
    """

    examples_are_files: ClassVar[bool] = True


_GOOD = """\
import codetta
from codetta.language import Row, gelu


@codetta.epilogue
def bias_gelu(acc, bias: Row):
    return gelu(acc + bias)"""


class UnknownTask(CandidateError, LookupError):
    template = "there is no task {name}. Tasks are {allowed}; or give the path of a task file."
    wrong = "from codetta.author.task import find\nfind('no_such_task')"
    right = "from codetta.author.task import names\nassert 'no_such_task' not in names()"
    examples_are_files = False


class UnknownCase(CandidateError, LookupError):
    template = (
        "task {task} has no case {case!r} under this seed. Stages are {stages}; a failed stage of "
        "`codetta verify` prints the seed and the name of its case."
    )
    wrong = (
        "from codetta.author.cases import named_case\n"
        "from codetta.author.task import find\n"
        "named_case(find('bias_gelu_mask'), 0, 'fuzz/999')"
    )
    right = (
        "from codetta.author.cases import named_case\n"
        "from codetta.author.task import find\n"
        "named_case(find('bias_gelu_mask'), 0, 'fuzz/00')"
    )
    examples_are_files = False


class NoCandidateFile(CandidateError, LookupError):
    template = (
        "{path} {given}. `codetta new TASK -o FILE` writes a file to start from, and "
        "`codetta new` lists the tasks."
    )
    wrong = "from codetta.author.candidate import load_candidate\nload_candidate('no/such/file.py')"
    right = "from codetta.author.skeleton import skeleton"
    examples_are_files = False


class BadTaskName(CandidateError, TypeError):
    template = (
        "TASK of {path} is {given}. Bind it to the name of a task, such as "
        'TASK = "bias_gelu_mask", or to the path of a task file, or leave it out and give --task.'
    )
    wrong = f"TASK = 3\n{_GOOD}"
    right = f'TASK = "bias_gelu_mask"\n{_GOOD}'


class NoEpilogue(CandidateError, ValueError):
    template = (
        "{path} {given}. Define one function `def NAME(acc, ...)` decorated with "
        "@codetta.epilogue at the top level of the file."
    )
    wrong = _GOOD.replace("@codetta.epilogue\n", "")
    right = _GOOD


class SeveralEpilogues(CandidateError, ValueError):
    template = (
        "{path} defines {count} epilogues: {names}. Only one is judged: bind `EPILOGUE = {first}` "
        "(or another) at the top level of the file, or delete the others."
    )
    wrong = (
        f"{_GOOD}\n\n\n@codetta.epilogue\ndef bias_alone(acc, bias: Row):\n    return acc + bias"
    )
    right = f"{wrong}\n\n\nEPILOGUE = bias_gelu"


class ProgramTooLong(CandidateError, ValueError):
    template = (
        "{path} makes a program of {count} nodes; {limit} is the limit. Loops are unrolled while "
        "the function is traced: write fewer turns, or a closed form."
    )
    wrong = _GOOD.replace(
        "    return gelu(acc + bias)",
        "    x = acc\n    for i in range(400):\n        x = x + bias\n    return x",
    )
    right = _GOOD


class NotWritten(CandidateError, RuntimeError):
    template = (
        "{path} is not written yet: it raises NotImplementedError. Put the program in place of "
        "that line, and return its outputs by name."
    )
    wrong = _GOOD.replace("return gelu(acc + bias)", "raise NotImplementedError")
    right = _GOOD


class CandidateRaised(CandidateError, RuntimeError):
    template = "{path} cannot be traced. {error}: {message}"
    wrong = _GOOD.replace("bias: Row", "bias")
    right = _GOOD


class CandidateTimeout(CandidateError, RuntimeError):
    template = (
        "{path} was still running after {seconds:g} s. It is traced once, without data, which "
        "takes milliseconds: do no work at the top level of the file, and let loops end."
    )
    wrong = f"import time\n\ntime.sleep(3600)\n{_GOOD}"
    right = _GOOD


class CandidateDied(CandidateError, RuntimeError):
    template = (
        "{path} was executed in a process of its own, which handed back no program: {given}. A "
        "candidate defines an epilogue and nothing else: no exit, no processes, no files."
    )
    wrong = f"import os\n\n{_GOOD}\n\n\nos._exit(3)"
    right = _GOOD


# ------------------------------------------------------------------------------------ models
class UnsupportedModel(CodettaError, ValueError):
    template = "codetta.nn.Decoder cannot run this model: {reason}. {fix}"
    wrong = "codetta.nn.Decoder.from_hf(torch.nn.Linear(2, 2))"
    right = ""


class AutocastUnsupported(CodettaError, RuntimeError):
    template = (
        "codetta.nn.Decoder does not run under torch.autocast({device!r}): its kernels keep the "
        "residual stream in the dtype of the weights, autocast would keep it in fp32, and results "
        "would silently differ. Leave autocast out and convert the model instead: load it with "
        "dtype=torch.bfloat16, or model.to(torch.bfloat16)."
    )
    wrong = ""
    right = ""


class UnknownOption(CodettaError, ValueError):
    template = "codetta.compile has no {option}={given!r}. Known are {allowed}."
    wrong = "codetta.compile(torch.nn.Linear(4, 4), backend='fast')"
    right = "codetta.compile(torch.nn.Linear(4, 4), backend='auto')"


class NotBuilt(CodettaError, NotImplementedError):
    template = "codetta.compile cannot do {what} yet. What works is {fix}."
    wrong = "codetta.compile(torch.nn.Linear(4, 4), pack=True)"
    right = "codetta.compile(torch.nn.Linear(4, 4), pack=False)"


class LogitsNotKept(CodettaError, AttributeError, RuntimeError):
    template = (
        "the logits are not there ({use} was asked of them): codetta.compile(..., logits='none') "
        "computes the loss without them. Compile with logits='keep', or call the model without "
        "labels, which returns them."
    )
    wrong = "codetta.capture.withheld.Withheld().argmax(-1)"
    right = "assert codetta.capture.withheld.Withheld() is not None"


class ShardedParameters(CodettaError, TypeError):
    template = (
        "{count} tensors of this model are DTensors (the first is placed {placements}); a Plan "
        "runs on plain tensors and would not communicate. With FSDP2, compile each block before "
        "it is sharded: block.forward = codetta.compile(block.forward), then fully_shard(block): "
        "it then sees its gathered weights. For tensor parallelism use torch.compile."
    )
    wrong = ""
    right = ""


class UnknownModel(CodettaError, ValueError):
    template = (
        "there is no model {given!r} to explain: {reason}. Give a model of the Hugging Face Hub "
        "whose config can be loaded, a folder or config.json, or one of {known}."
    )
    wrong = (
        "from codetta.explanation.configs import configuration\n"
        "configuration('./nowhere/config.json')"
    )
    right = ""


class UnknownGpu(CodettaError, ValueError):
    template = "no roofline figures are known for GPU {given!r}. Known are {allowed}."
    wrong = "codetta.explain(torch.nn.Linear(4, 4), a).on('gtx')"
    right = "codetta.explain(torch.nn.Linear(4, 4), a).on('h200')"


class MissingPackage(CodettaError, ImportError):
    template = "{what} needs the package {package}, which is {given}. Install it with {fix}."
    wrong = ""
    right = ""


# ------------------------------------------------------------------------- recorded programs
class RegistryError(CodettaError):
    """Programs are promoted to a registry after they have been verified, and read from it."""


class NotPromoted(RegistryError, ValueError):
    template = "{file} is not promoted: {stage} {verdict}: {reason}. {fix}"
    wrong = ""
    right = ""


class NothingRecorded(RegistryError, LookupError):
    template = (
        "no program is recorded for task {task!r}{dtype}; recorded are {known}. Write one "
        "(`codetta new {task}`), and `codetta promote` it once it is verified."
    )
    wrong = "codetta.programs.recorded('bias_gelu_mask', dtype='float64')"
    right = "codetta.gemm(a, b, codetta.programs.relu_squared)"


class RegistryNotWritable(RegistryError, RuntimeError):
    template = (
        "{file} cannot be written: {reason}. Name a file that can in the environment variable "
        "CODETTA_REGISTRY."
    )
    wrong = (
        "import os\n"
        "from codetta.author import records\n"
        "os.environ['CODETTA_REGISTRY'] = os.devnull + '/registry.jsonl'\n"
        "try:\n"
        "    records.append(None)\n"
        "finally:\n"
        "    del os.environ['CODETTA_REGISTRY']"
    )
    right = "from codetta.author import records\nassert records.user_file().suffix == '.jsonl'"


# ------------------------------------------------------------------------- models as authors
class LoopError(CodettaError):
    """``codetta author`` has a language model write a program, and keeps a trace of it."""


class NoEndpoint(LoopError, RuntimeError):
    template = (
        "no language model can be asked: {given}. Set OPENAI_API_KEY, and OPENAI_BASE_URL where "
        "the endpoint is another than OpenAI's, such as http://localhost:8000/v1."
    )
    wrong = "from codetta.author.client import endpoint\nendpoint({})"
    right = (
        "from codetta.author.client import endpoint\n"
        "endpoint({'OPENAI_BASE_URL': 'http://localhost:8000/v1'})"
    )


class EndpointFailed(LoopError, RuntimeError):
    template = "{url} did not answer for model {model!r}: {reason}. {fix}"
    wrong = (
        "from codetta.author.client import Endpoint, Model\n"
        "nobody = Endpoint('http://127.0.0.1:9/v1', 'none')\n"
        "Model(nobody, 'some-model', attempts=1).ask([], timeout_s=5)"
    )
    right = ""


class TraceUnusable(LoopError, ValueError):
    template = "{path} {reason}. {fix}"
    wrong = "from codetta.author.trace import Trace\nTrace.resume('no/such/folder')"
    right = (
        "import tempfile\n"
        "from codetta.author.trace import Trace\n"
        "Trace.create(tempfile.mkdtemp() + '/run', {'task': 'bias_gelu_mask'})"
    )
