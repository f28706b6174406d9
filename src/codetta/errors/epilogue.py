"""Writing an epilogue, and the text of a program."""

from __future__ import annotations

from codetta.errors.base import CodettaError


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
