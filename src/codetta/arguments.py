"""The arguments of ``codetta.gemm``: what a program asks for, every check, and canonical arrays.

All checks run before anything else does, name the operand, and say what was expected. They are
plain Python on sizes and dtypes, so that Dynamo traces them away and a compiled call has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from codetta.errors import (
    BadRank,
    BadTile,
    DeviceMismatch,
    DtypeMismatch,
    Fp8NeedsNoGrad,
    Fp8Pair,
    InnerMismatch,
    MissingOperand,
    NotAProgram,
    NotATensor,
    NotDivisible,
    OperandDtype,
    OperandShape,
    TooFewColumns,
    UnknownOperand,
    UnsupportedDtype,
    UnsupportedTensor,
)
from codetta.language.meaning import FP8
from codetta.language.primitives import PRIMITIVES
from codetta.language.program import Program

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: Allowed dtypes of a and b where they are fp8; torch._scaled_mm takes the same.
FP8_PAIRS = (
    (torch.float8_e4m3fn, torch.float8_e4m3fn),
    (torch.float8_e5m2, torch.float8_e4m3fn),
    (torch.float8_e4m3fn, torch.float8_e5m2),
)
INDICES = (torch.int64, torch.int32)
_PLAIN = (Tensor, torch.nn.Parameter)


class OperandSpec(NamedTuple):
    """One operand as the checks need it: Dynamo guards on plain values."""

    name: str
    kind: str
    numerator: int
    denominator: int
    rotary_dim: int


class CallSpec(NamedTuple):
    """What a call of a program needs: its text, its operands, and what N must satisfy."""

    name: str
    text: str
    line: str
    signature: str
    operands: tuple[OperandSpec, ...]
    granule: int
    reason: str
    heads: tuple[tuple[int, int, int, int], ...]  # (heads, head_dim, width numerator, denominator)
    stores_fp8: str  # name of the first output stored in fp8, or ""


@lru_cache(maxsize=1024)
def call_spec(program: Program) -> CallSpec:
    if not program.has_acc:
        raise NotAProgram(given=f"{program.name!r}, a program without an accumulator")
    operands = []
    for o in program.operands:
        width = o.width
        operands.append(
            OperandSpec(o.name, o.kind.value, width.numerator, width.denominator,
                        _rotary_dim(program, o.name))
        )  # fmt: skip
    heads = []
    for node in program.nodes:
        if node.op == "rotate" and node.attr("heads") > 0:
            cols = program.nodes[node.args[0]].type.cols
            heads.append(
                (node.attr("heads"), node.attr("head_dim"), cols.numerator, cols.denominator)
            )
    return CallSpec(
        program.name,
        program.text,
        program.line,
        program.signature,
        tuple(operands),
        program.granule,
        _granule_reason(program),
        tuple(heads),
        next((o.name for o in program.outputs if o.dtype in ("e4m3", "e5m2")), ""),
    )


def _rotary_dim(program: Program, name: str) -> int:
    """Number of columns of the table of a rotary operand, as its rotations declare; else 0."""
    for node in program.nodes:
        if node.op == "rotate" and program.nodes[node.args[1]].attr("name") == name:
            return int(node.attr("rotary_dim"))
    return 0


def _granule_reason(program: Program) -> str:
    ops = {n.op for n in program.nodes}
    found = [
        why
        for op, why in (
            ("unpack", "it takes pairs of columns apart"),
            ("pack", "it makes pairs of columns"),
            ("rotate", "it rotates whole heads"),
            ("group_sum", "it sums whole groups"),
            ("ungroup", "it spreads values over whole groups"),
        )
        if op in ops
    ]
    assert all(op in PRIMITIVES for op in ops)
    return " and ".join(found) or "an operand is narrower than N"


# ------------------------------------------------------------------------------- a, b, tile
def checked_text(epilogue: Any) -> str:
    """The text of the program, by which Dynamo and the caches know it."""
    if not isinstance(epilogue, Program):
        raise NotAProgram(given=f"a {type(epilogue).__name__}")
    return epilogue.text


def check_tensor(name: str, x: Any, fix: str = "Convert it with torch.as_tensor(...).") -> None:
    """Raise unless x is a plain strided tensor."""
    if type(x) in _PLAIN and x.layout is torch.strided and not x.is_nested:
        return
    if not isinstance(x, Tensor):
        raise NotATensor(name=name, given=f"a {type(x).__name__}", fix=fix)
    if x.is_nested:
        _unsupported(name, "nested tensor", "pass x.values() and offsets of your own")
    if x.layout is not torch.strided:
        kind = str(x.layout).removeprefix("torch.").removeprefix("_")
        _unsupported(name, f"{kind} tensor", "convert it with .to_dense()")
    if type(x) not in _PLAIN and not _is_tracing_tensor(x):
        kind = type(x).__name__
        _unsupported(
            name, kind, "pass the local tensor (of a DTensor: .to_local() or .full_tensor())"
        )


def _is_tracing_tensor(x: Tensor) -> bool:
    """Stand-ins of torch's own tracers, which end up as plain tensors."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(x, FakeTensor | FunctionalTensor)


def _unsupported(name: str, given: str, fix: str) -> NoReturn:
    raise UnsupportedTensor(name=name, given=given, fix=fix)


def check_matrices(a: Tensor, b: Tensor) -> None:
    """Ranks, inner sizes, dtypes and devices of a (..., K) and b (K, N)."""
    check_tensor("a", a)
    check_tensor("b", b)
    if a.ndim < 1:
        raise BadRank(name="a", given=tuple(a.shape), expected="(..., K)", fix="Reshape it.")
    if b.ndim != 2:
        raise BadRank(
            name="b",
            given=tuple(b.shape),
            expected="(K, N)",
            fix="Batches of weights are one call each; a weight in nn.Linear layout is `w.t()`.",
        )
    if a.shape[-1] != b.shape[0]:
        raise InnerMismatch(a=tuple(a.shape), b=tuple(b.shape), ka=a.shape[-1], kb=b.shape[0])
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in FLOATS and x.dtype not in FP8:
            raise UnsupportedDtype(name=name, given=x.dtype, allowed=_names(FLOATS + FP8))
    if a.dtype in FP8 or b.dtype in FP8:
        if (a.dtype, b.dtype) not in FP8_PAIRS:
            raise Fp8Pair(a=a.dtype, b=b.dtype)
    elif a.dtype != b.dtype:
        raise DtypeMismatch(a=a.dtype, b=b.dtype)
    if a.device != b.device:
        raise DeviceMismatch(given=f"a on {a.device}, b on {b.device}")


def check_columns(spec: CallSpec, n: int) -> None:
    """N fits the pairs, groups and heads of the program."""
    if n % spec.granule:
        raise NotDivisible(program=spec.name, granule=spec.granule, reason=spec.reason, n=n)
    for heads, head_dim, numerator, denominator in spec.heads:
        if heads * head_dim > n * numerator // denominator:
            raise TooFewColumns(
                program=spec.name, heads=heads, head_dim=head_dim, n=n * numerator // denominator
            )


def check_tile(spec: CallSpec, tile: Any) -> None:
    reason = ""
    if not isinstance(tile, tuple | list) or len(tile) != 2:
        reason = "it is not a pair"
    elif not all(isinstance(t, int) and not isinstance(t, bool) and t > 0 for t in tile):
        reason = "both must be positive integers"
    elif tile[1] % spec.granule:
        reason = f"{tile[1]} is no multiple of {spec.granule} ({spec.reason})"
    if reason:
        raise BadTile(given=tile, program=spec.name, reason=reason, granule=spec.granule)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


# ------------------------------------------------------------------------------- operands
def canonical_operands(
    spec: CallSpec, a: Tensor, b: Tensor, m: int, given: Mapping[str, Any]
) -> list[Tensor]:
    """The operands as two-dimensional arrays in the program's order, all of them checked."""
    if len(given) != len(spec.operands) or any(o.name not in given for o in spec.operands):
        _wrong_names(spec, given)
    call = _Call(spec, a, b, m)
    flat: list[Tensor] = []
    scalars: list[tuple[int, float]] = []
    for o in spec.operands:
        value = given[o.name]
        if o.kind == "Scalar" and isinstance(value, int | float):
            scalars.append((len(flat), value))
            flat.append(a)  # replaced below, once the compute dtype is known
        elif o.kind == "Rotary":
            flat += call.rotary(o, value)
        else:
            flat.append(call.array(o, value))
    if scalars:
        wide = any(x.dtype is torch.float64 for x in flat)
        dtype = torch.float64 if wide else torch.float32
        for i, number in scalars:
            flat[i] = torch.full((1, 1), number, dtype=dtype, device=a.device)
    if (a.dtype in FP8 or spec.stores_fp8) and torch.is_grad_enabled():
        _refuse_gradient(spec, a, b, given)
    return flat


def _refuse_gradient(spec: CallSpec, a: Tensor, b: Tensor, given: Mapping[str, Any]) -> None:
    """fp8 is for kernels: what a gradient through a quantization means is the caller's."""
    what = f"a in {a.dtype}" if a.dtype in FP8 else f"an fp8 store, {spec.stores_fp8!r}"
    named: list[tuple[str, Any]] = [("a", a), ("b", b)]
    for name, value in given.items():
        named += [(name, x) for x in (value if isinstance(value, tuple | list) else (value,))]
    for name, x in named:
        if isinstance(x, Tensor) and x.requires_grad:
            raise Fp8NeedsNoGrad(program=spec.name, what=what, name=name)


def _wrong_names(spec: CallSpec, given: Mapping[str, Any]) -> NoReturn:
    known = [o.name for o in spec.operands]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise UnknownOperand(
            program=spec.name, unknown=", ".join(map(repr, unknown)), signature=spec.signature
        )
    missing = ", ".join(repr(name) for name in known if name not in given)
    raise MissingOperand(program=spec.name, missing=missing, signature=spec.signature)


class _Call:
    """Sizes of one call, for the checks of its operands."""

    def __init__(self, spec: CallSpec, a: Tensor, b: Tensor, m: int) -> None:
        self.spec, self.a, self.b, self.m = spec, a, b, m
        self.lead = tuple(a.shape[:-1])

    def array(self, o: OperandSpec, x: Any) -> Tensor:
        fix = (
            "Give a Python number or a tensor with one element."
            if o.kind == "Scalar"
            else "Convert it with torch.as_tensor(...)."
        )
        check_tensor(f"operand {o.name!r}", x, fix)
        self.same_device(o.name, x)
        self.dtype(o, x.dtype, INDICES if o.kind == "Index" else FLOATS)
        shape = tuple(x.shape)
        if o.kind == "Scalar":
            if x.numel() != 1:
                self.wrong_shape(o, shape, "one element")
            return x if shape == (1, 1) else x.reshape(1, 1)
        cols = self.b.shape[1] * o.numerator // o.denominator
        if o.kind == "Row":
            if shape != (cols,):
                self.wrong_shape(o, shape, f"({cols},)")
            return x.unsqueeze(0)
        if o.kind == "Tile":
            if shape != (*self.lead, cols):
                self.wrong_shape(o, shape, str((*self.lead, cols)))
            return x if x.ndim == 2 else x.reshape(self.m, cols)
        if shape != self.lead and shape != (*self.lead, 1):
            self.wrong_shape(o, shape, f"{self.lead} or {(*self.lead, 1)}")
        return x if shape == (self.m, 1) else x.reshape(self.m, 1)

    def rotary(self, o: OperandSpec, value: Any) -> list[Tensor]:
        name = f"operand {o.name!r}"
        if not isinstance(value, tuple | list) or len(value) != 2:
            given = f"a {type(value).__name__}"
            raise NotATensor(name=f"{name} (Rotary)", given=given,
                             fix="Give a tuple (table, positions).")  # fmt: skip
        table, positions = value
        check_tensor(f"the table of {name}", table)
        check_tensor(f"the positions of {name}", positions)
        self.same_device(o.name, table)
        self.same_device(o.name, positions)
        self.dtype(o, table.dtype, FLOATS, "table: ")
        self.dtype(o, positions.dtype, INDICES, "positions: ")
        if table.ndim != 2 or table.shape[1] != o.rotary_dim:
            self.wrong_shape(
                o, tuple(table.shape), f"table (positions, {o.rotary_dim}) [cos | sin]"
            )
        shape = tuple(positions.shape)
        if shape != self.lead:
            padded = (1,) * (len(self.lead) - len(shape)) + shape
            fits = len(padded) == len(self.lead) and all(
                p == 1 or p == s for p, s in zip(padded, self.lead, strict=True)
            )
            if not fits:
                self.wrong_shape(o, shape, f"positions {self.lead} or broadcastable to it")
            positions = positions.expand(self.lead)
        return [table, positions if positions.ndim == 1 else positions.reshape(self.m)]

    def same_device(self, name: str, x: Tensor) -> None:
        if x.device != self.a.device:
            raise DeviceMismatch(given=f"a on {self.a.device}, {name} on {x.device}")

    def dtype(
        self, o: OperandSpec, given: torch.dtype, allowed: Sequence[torch.dtype], what: str = ""
    ) -> None:
        if given not in allowed:
            raise OperandDtype(
                operand=o.name,
                kind=o.kind,
                program=self.spec.name,
                given=f"{what}{given}",
                expected=_names(allowed),
            )

    def wrong_shape(self, o: OperandSpec, given: tuple[int, ...], expected: str) -> NoReturn:
        raise OperandShape(
            operand=o.name,
            kind=o.kind,
            program=self.spec.name,
            given=given,
            expected=expected,
            a=tuple(self.a.shape),
            b=tuple(self.b.shape),
        )
