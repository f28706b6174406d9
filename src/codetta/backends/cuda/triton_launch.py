"""The host side of a generated kernel: classes of its arrays, outputs, grid and arguments.

These run on every call, so they are generated as well: one lambda each, all loops over operands
unrolled and all case distinctions made beforehand. That is a third of the time of a general loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from codetta.backends.cuda.arrays import allocator
from codetta.backends.cuda.triton_stages import components
from codetta.backends.cuda.triton_task import Array, Cut, Parameter, Task
from codetta.language.primitives import ROW_REDUCTIONS

DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.bool: "i1",
}
_TORCH = {name: dtype for dtype, name in DTYPES.items()}
#: Roles whose contiguous axis is the rows.
_TALL = frozenset({"col", "positions", "map"})
_FIELDS = 4  # of a tensor in the key: dtype, contiguous, aligned rows, aligned pointer

#: Of ``Direct.scope``; see :meth:`Host.direct`.
_LAUNCH = "run({grid}, 1, 1, stream(device), f, meta, None, None, None, {arguments})"

Key = tuple[Any, ...]
#: (outputs, tensors, m, n) -> launched.
Launch = Callable[..., Any]
#: (tensors) -> outputs.
Fixed = Callable[[Sequence[Tensor]], list[Tensor]]


class Direct(NamedTuple):
    """A compiled kernel on a device, with its parameters."""

    parameters: tuple[Parameter, ...]
    kernel: Any
    device: int

    def scope(self) -> dict[str, Any]:
        return {
            "run": self.kernel.run, "f": self.kernel.function,
            "meta": self.kernel.packed_metadata, "device": self.device,
            "stream": torch._C._cuda_getCurrentRawStream,
        }  # fmt: skip


class Host:
    """Generated functions of one task.

    Attributes:
        key: (tensors, n) -> class of the call, see :meth:`arrays`.
        outputs: (allocator, m, n) -> fresh output tensors, see :func:`arrays.allocator`.
    """

    def __init__(self, task: Task, cut: Cut) -> None:
        self.task, self.cut = task, cut
        self.roles = [role for _, roles in task.tensors.values() for role in roles]
        widths = [f"{_times('n', w)} % 16 == 0" for w in task.widths]
        fields = [f for i, role in enumerate(self.roles) for f in _fields(i, role)]
        self.key = _function("t, n", f"(t[0].device, {', '.join(widths + fields)})")
        made = ", ".join(f"e({_extents(a)}, DT[{d!r}])" for a, d in shapes(task, cut))
        self.outputs = _function("e, m, n", f"[{made}]")

    def arrays(self, key: Key) -> tuple[tuple[Array, ...], frozenset[Fraction]]:
        """What the code generator needs to know of a class of calls."""
        _, *rest = key  # a compiled kernel belongs to one device
        count = len(self.task.widths)
        aligned = (w for w, whole in zip(self.task.widths, rest[:count], strict=True) if whole)
        fields = rest[count:]
        starts = range(0, len(fields), _FIELDS)
        return (
            tuple(Array(DTYPES[fields[i]], fields[i + 1], fields[i + 2]) for i in starts),
            frozenset(aligned),
        )

    def launcher(self, parameters: tuple[Parameter, ...]) -> Callable[..., Any]:
        """(kernel, outputs, tensors, m, n, options) -> launched with its grid and arguments."""
        tall, wide = chunks(self.task, self.cut)
        arguments = ", ".join(self._argument(p, wide) for p in parameters)
        call = f"k[({tall} * {wide}, 1, 1)]({arguments}, **options)"
        return _function("k, o, t, m, n, options", call)

    def direct(self, compiled: Direct) -> Launch:
        """(outputs, tensors, m, n) -> the compiled kernel launched on the device's current stream.

        Triton's own ``kernel[grid](...)`` looks up device, stream and hooks anew at every call and
        makes a closure; that is half of the host time of a small kernel. Hooks of Triton's
        profiler are not called.
        """
        tall, wide = chunks(self.task, self.cut)
        arguments = ", ".join(self._argument(p, wide) for p in compiled.parameters)
        call = _LAUNCH.format(grid=f"{tall} * {wide}", arguments=arguments)
        return _function("o, t, m, n", call, compiled.scope())

    def fixed(self, compiled: Direct, tensors: Sequence[Tensor], m: int, n: int) -> Fixed:
        """(tensors) -> outputs, for tensors like these: all numbers are written out."""
        tall, wide = chunks(self.task, self.cut)
        known = {"t": tensors, "m": m, "n": n}
        names = {"out": "o", "pointer": "t"}
        texts = [
            f"{names[p.what]}{p.position}"
            if p.what in names
            else str(eval(self._argument(p, wide), known))
            for p in compiled.parameters
        ]
        fresh = self.outputs(lambda *given: given, m, n)
        scope = compiled.scope() | {f"k{i}": given for i, given in enumerate(fresh)}
        outs = [f"o{i}" for i in range(len(fresh))]
        lines = [
            f"{''.join(f't{i}, ' for i in range(len(tensors)))}= t",
            *(f"{o} = e(*k{i})" for i, o in enumerate(outs)),
            _LAUNCH.format(grid=eval(f"{tall} * {wide}", known), arguments=", ".join(texts)),
            f"return [{', '.join(outs)}]",
        ]
        scope["e"] = allocator(tensors[0].device)
        exec("def fixed(t):\n" + "".join(f"    {x}\n" for x in lines), scope)
        made: Fixed = scope["fixed"]
        return made

    def _argument(self, p: Parameter, wide: str) -> str:
        if p.what == "out":
            return f"o[{p.position}]"
        if p.what == "pointer":
            return f"t[{p.position}]"
        if p.what in ("M", "chunks"):
            return "m" if p.what == "M" else wide
        if p.what == "cols":
            text = _times("n", p.width)
        else:
            x, role = f"t[{p.position}]", self.roles[p.position]
            if p.what == "size":
                sizes = {"total": "numel()", "over_cols": "shape[1]"}
                return f"{x}.{sizes.get(role, 'shape[0]')}"
            text = f"{x}.stride({0 if p.what == 'row' or role in _TALL else 1})"
        return f"{text} // 16" if p.divided else text


def _fields(i: int, role: str) -> list[str]:
    x = f"t[{i}]"
    if role in _TALL:
        near, rows = f"{x}.stride(0) == 1 or {x}.shape[0] == 1", "False"
    elif role in ("scalar", "total"):
        near, rows = "True", "False"
    else:
        near = f"{x}.stride(1) == 1 or {x}.shape[1] == 1"
        rows = "False" if role == "row" else f"{x}.stride(0) % 16 == 0"
    return [f"{x}.dtype", near, rows, f"{x}.data_ptr() % 16 == 0"]


def _function(
    arguments: str, expression: str, more: dict[str, Any] | None = None
) -> Callable[..., Any]:
    scope = {"DT": _TORCH, **(more or {})}
    made: Callable[..., Any] = eval(f"lambda {arguments}: {expression}", scope)
    return made


def _times(n: str, width: Fraction) -> str:
    text = n if width.numerator == 1 else f"{n} * {width.numerator}"
    return text if width.denominator == 1 else f"({text} // {width.denominator})"


def chunks(task: Task, cut: Cut) -> tuple[str, str]:
    """Expressions of m and n for the number of chunks of rows and of columns."""
    tall = f"(-(-m // {cut.chunk_rows}))" if task.has_rows else "1"
    wide = f"(-(-n // {cut.chunk_cols}))" if cut.chunk_cols and task.has_cols else "1"
    return tall, wide


def shapes(task: Task, cut: Cut) -> list[tuple[list[str], str]]:
    """Expressions of m and n for the sizes of each output tensor, and its dtype."""
    tall, wide = chunks(task, cut)
    found: list[tuple[list[str], str]] = []
    for sink in task.sinks:
        node = task.program.nodes[sink.node]
        if sink.kind != "partial":
            axes = ["m"] * node.type.has_rows + [_times("n", node.type.cols)] * node.type.has_cols
            found.append((axes, sink.dtype))
            continue
        source = task.program.nodes[node.args[0]].type
        if node.op == "totalsum":
            axes = [tall, wide]
        elif node.op in ROW_REDUCTIONS:
            axes = ["m" if source.has_rows else "1", wide]
        else:
            axes = [tall, _times("n", source.cols) if source.has_cols else "1"]
        found += [(axes, sink.dtype)] * components(task.program, sink.node)
    return found


def _extents(axes: list[str]) -> str:
    """Shape and strides of a contiguous output of at most two axes, none of them empty."""
    strides = [*axes[1:], "1"][: len(axes)]
    return ", ".join(f"({''.join(f'{a}, ' for a in of)})" for of in (axes, strides))


def contiguous_totals(tensors: list[Tensor], roles: list[str]) -> list[Tensor]:
    """Partials of a total are read as one line of numbers."""
    return [
        x.contiguous() if role == "total" else x for x, role in zip(tensors, roles, strict=True)
    ]
