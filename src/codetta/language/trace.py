"""``@epilogue`` and ``@finalizer``: from a Python function over symbolic values to a Program.

The function runs once, at decoration, with one symbolic value per annotated operand (an epilogue
also with a symbolic accumulator). Whatever it does wrong is a named error with the line of the
function.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import FrameType
from typing import Any

from codetta.errors import (
    BadAttribute,
    BadOutput,
    BadPairLayout,
    CodettaError,
    MissingAccumulator,
    MissingAnnotation,
    NoOutputs,
    ReservedName,
    UnknownAnnotation,
)
from codetta.language.functions import Store
from codetta.language.program import Operand, Output, Program
from codetta.language.types import NUMERIC, Kind, Type, default_path, parse_pairs
from codetta.language.values import Tracer, Value

RESERVED = ("acc", "a", "b", "epilogue", "tile", "out", "raw")


class OperandKind:
    """An annotation: ``r: Col``, ``z: Tile(width=2, pairs='adjacent')``, ``w: Row(width=0.5)``."""

    def __init__(self, kind: Kind, width: Fraction = Fraction(1), pairs: str = "adjacent") -> None:
        self.kind, self.width, self.pairs = kind, width, pairs

    def __call__(self, *, width: float | Fraction = 1, pairs: str = "adjacent") -> OperandKind:
        """The same kind with another width (a multiple of N) and pair layout."""
        if self.kind not in (Kind.TILE, Kind.ROW):
            raise BadAttribute(
                op=self.kind.value, attribute="width", given=width, fix="only Tile and Row have one"
            )
        exact = Fraction(width).limit_denominator(1 << 20)
        try:
            parse_pairs(pairs)
        except ValueError:
            raise BadPairLayout(given=pairs) from None
        try:
            default_path(exact, pairs)
        except ValueError:
            raise BadAttribute(
                op=self.kind.value, attribute="width", given=width, fix="use 2, 1 or 1/g"
            ) from None
        return OperandKind(self.kind, exact, pairs)

    def __repr__(self) -> str:
        return self.kind.value


#: An (M, width N) array loaded tile by tile.
Tile = OperandKind(Kind.TILE)
#: A vector over the columns, (width N,).
Row = OperandKind(Kind.ROW)
#: A vector over the rows, (M,).
Col = OperandKind(Kind.COL)
#: One number: a Python number or a tensor with one element.
Scalar = OperandKind(Kind.SCALAR)
#: M integers, each the number of a column; for select.
Index = OperandKind(Kind.INDEX)
#: Rotary tables and positions, given as ``(table, positions)``; for rotate.
Rotary = OperandKind(Kind.ROTARY)

KINDS = {k.kind.value: k for k in (Tile, Row, Col, Scalar, Index, Rotary)}


class ProgramTracer(Tracer):
    """Tracer whose leaves are the accumulator and the declared operands."""

    def acc(self) -> Value:
        return self.leaf("acc", Type(Kind.TILE))

    def operand(self, operand: Operand) -> Value:
        return self.leaf("operand", operand.type, name=operand.name)


def epilogue(function: Callable[..., Any], /) -> Program:
    """Trace ``function(acc, **operands)`` to a :class:`Program`.

    ``acc`` is the accumulator tile (fp32 or wider) of ``a @ b``. Operands are annotated with
    ``Tile``, ``Row``, ``Col``, ``Scalar``, ``Index`` or ``Rotary``. The function returns one value
    or a dict of name to value; tiles are stored in a's dtype (see :func:`~codetta.language.store`),
    reductions are finalized over all tiles and returned in the accumulator's dtype.

        @codetta.epilogue
        def residual_ssq(acc, residual: Tile):
            x = round_to(acc + residual)
            return {"x": x, "ssq": rowsum(x * x)}

    Raises:
        EpilogueError: a subclass per mistake, with the line of the function and the fix.
    """
    return _traced(function, has_acc=True)


def finalizer(function: Callable[..., Any], /) -> Program:
    """Trace ``function(**operands)``, which has no accumulator, to a :class:`Program`.

    Such a Program is a small kernel of its own, over rows or over tiles that are loaded: what turns
    completed reductions into the vector the next epilogue needs, or the pointwise step after an
    operation that is no GEMM. Operands and outputs are those of an epilogue, and vectors may be
    outputs too, stored in the accumulator's dtype by default.

        @finalizer
        def rms_link_coefficient(r: Col, zdz: Col, dim: Scalar):
            return r * r * zdz / dim

    Raises:
        EpilogueError: a subclass per mistake, with the line of the function and the fix.
    """
    return _traced(function, has_acc=False)


def _traced(function: Callable[..., Any], *, has_acc: bool) -> Program:
    name = getattr(function, "__name__", "epilogue")
    name = name if name.isidentifier() else "epilogue" if has_acc else "finalizer"
    where = _definition(function)
    operands = _operands(function, name, where, has_acc=has_acc)
    tracer = ProgramTracer(name)
    values = {o.name: tracer.operand(o) for o in operands}
    result = function(*([tracer.acc()] if has_acc else []), **values)
    outputs, bare = _outputs(tracer, name, where, result, vectors=not has_acc)
    try:
        return Program.build(name, operands, tracer.nodes, outputs, bare=bare)
    except CodettaError as error:
        raise type(error)(where, **error.fields) from None


def _definition(function: Callable[..., Any]) -> str | None:
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    try:
        lines = inspect.getsource(function).strip().splitlines()
        source = next((x.strip() for x in lines if not x.strip().startswith("@")), "")
    except (OSError, TypeError):
        source = f"def {code.co_name}"
    return f"{code.co_filename}:{code.co_firstlineno}: {source}"


def _operands(
    function: Callable[..., Any], name: str, where: str | None, *, has_acc: bool
) -> list[Operand]:
    parameters = list(inspect.signature(function).parameters.values())
    if has_acc:
        if not parameters or parameters[0].name != "acc":
            given = repr(parameters[0].name) if parameters else "missing"
            raise MissingAccumulator(where, name=name, given=given)
        del parameters[0]
    annotations = _annotations(function)
    operands = []
    allowed = ", ".join(KINDS)
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or p.annotation is p.empty:
            raise MissingAnnotation(where, operand=p.name, name=name, allowed=allowed)
        spec = annotations.get(p.name)
        if not isinstance(spec, OperandKind):
            raise UnknownAnnotation(
                where, operand=p.name, name=name, given=p.annotation, allowed=allowed
            )
        check_name(p.name, "operand", name, where)
        operands.append(Operand(p.name, spec.kind, spec.width, spec.pairs))
    return operands


def _annotations(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Annotations as objects. Strings (``from __future__ import annotations``) are evaluated in
    the function's globals and where it is decorated, with the operand kinds as a fallback."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    around = dict(frame.f_locals) if frame is not None else {}
    closure = inspect.getclosurevars(function).nonlocals
    scope = {**KINDS, "Fraction": Fraction, **around, **closure}
    found: dict[str, Any] = {}
    for key, value in getattr(function, "__annotations__", {}).items():
        if isinstance(value, str):
            try:
                value = eval(value, {**scope, **function.__globals__}, scope)
            except Exception:
                continue  # reported as an unknown annotation
        found[key] = value
    return found


def check_name(given: str, what: str, name: str, where: str | None) -> None:
    """Raise ReservedName unless ``given`` may name an operand or an output."""
    if (
        not isinstance(given, str)
        or not given.isidentifier()
        or given.startswith(("_", "d_", "saved_"))
        or given in RESERVED
    ):
        raise ReservedName(where, what=what, given=given, name=name, reserved=", ".join(RESERVED))


def _outputs(
    tracer: Tracer, name: str, where: str | None, result: Any, *, vectors: bool
) -> tuple[list[Output], bool]:
    bare = isinstance(result, Value | Store)
    named = {"result": result} if bare else result
    if not isinstance(named, Mapping) or not named:
        given = "an empty dict" if isinstance(named, Mapping) else f"a {type(result).__name__}"
        raise NoOutputs(where, name=name, given=given)
    outputs = []
    for key, value in named.items():
        if not bare:
            check_name(key, "output", name, where)
        dtype = value.dtype if isinstance(value, Store) else None
        value = value.value if isinstance(value, Store) else value
        if not isinstance(value, Value):
            raise BadOutput(
                where,
                output=key,
                name=name,
                given=f"a {type(value).__name__}",
                fix="return traced values",
            )
        value = tracer.lift(value, "output")
        vector = value.type.reduced or (vectors and value.type.kind in NUMERIC)
        if value.type.kind is not Kind.TILE and not vector:
            raise BadOutput(
                where,
                output=key,
                name=name,
                given=f"a {value.type}",
                fix="a vector that does not depend on a tile needs no epilogue; compute it outside",
            )
        default = "operand" if value.type.kind is Kind.TILE else "accumulator"
        outputs.append(Output(key, value.id, dtype or default))
    return outputs, bare
