"""What a region costs as a Plan, and what its kernels compute."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from codetta.capture.call import RegionCall
from codetta.explanation.facts import BACKWARD, FORWARD, GEMM, MEMORY, KernelFact
from codetta.language.types import Kind
from codetta.nn.block import HALVES, Compiled, compiled
from codetta.plan import Plan
from codetta.plan.cost import cost_table, launched
from codetta.plan.kernels import Kernel
from codetta.plan.listing import Listing
from codetta.plan.schedule import Schedule
from codetta.plan.sides import Sides


@dataclass(frozen=True)
class Sizes:
    """What a region is run on: M, operand dtype, rows of its rotary tables, wanted gradients, and
    weights that lie side by side in memory already."""

    tokens: int
    dtype: torch.dtype
    positions: int
    wanted: tuple[str, ...]
    packed: tuple[Sides, ...] = ()


def sizes_of(call: RegionCall, arguments: Sequence[Any], results: Sequence[Tensor]) -> Sizes:
    """Read off the call's fake arguments and results."""
    training = any(x.requires_grad for x in results)
    argument, axes = call.like
    tokens = 1
    for a in axes:
        tokens *= int(arguments[argument].shape[a])
    dtype, positions, wanted = torch.bfloat16, tokens, []
    for g in call.given:
        tensors: list[Tensor] = [arguments[i] for i in g.arguments]
        if g.kind in ("tile", "weight"):
            dtype = tensors[0].dtype
        if g.kind == "rope":
            positions = tensors[0].numel() // tensors[0].shape[-1]
        elif training and tensors[0].requires_grad:
            wanted.append(g.name)
    return Sizes(tokens, dtype, positions, tuple(wanted))


def kernels_of(call: RegionCall, sizes: Sizes) -> tuple[KernelFact, ...]:
    """Kernels of a region, forward and backward, as the fused backend runs them.

    The gradients of results that are columns of one matrix (q, k and v) arrive apart; joining them
    is one more kernel.
    """
    plan, parts = _compiled(call, sizes)
    names = _Names(plan, call.shared_names)
    found = _facts(parts.forward, sizes, FORWARD, names)
    if parts.backward is not None:
        found += _joins(call, plan, sizes)
        found += _facts(parts.backward, sizes, BACKWARD, names)
    return tuple(found)


def key_of(call: RegionCall, sizes: Sizes) -> str:
    """Equal for regions that are the same but for the names of their inputs."""
    wanted = sorted(call.shared_names[n] for n in sizes.wanted)
    columns = [m.columns for m in call.made]
    size = f"{sizes.tokens} {sizes.dtype} {sizes.positions} {wanted} {columns} {sizes.packed}"
    return f"{call.shared_plan(HALVES).text}\n{size}"


def _compiled(call: RegionCall, sizes: Sizes) -> tuple[Plan, Compiled]:
    """In the pair layout of a GPU."""
    wanted = {call.shared_names[n] for n in sizes.wanted}
    plan = call.shared_plan(call.layout(fused=True))
    names = tuple(i.name for i in plan.inputs if i.name in wanted)
    outputs = tuple(o.name for o in plan.outputs)
    return plan, compiled(plan, names, outputs, recompute=call.recompute)


def _facts(schedule: Schedule, sizes: Sizes, phase: str, names: _Names) -> list[KernelFact]:
    rows = cost_table(
        schedule, tokens=sizes.tokens, dtype=sizes.dtype, positions=sizes.positions,
        packed=sizes.packed,
    )  # fmt: skip
    kernels = launched(schedule, sizes.packed)
    listing = Listing(schedule.plan)
    found = []
    for k, row in zip(kernels, rows, strict=True):
        formulas = [(names.short(n), names.short(f)) for n, f in listing.formulas(k)]
        found.append(
            KernelFact(
                name=names.short(", ".join(listing.name(w) for w in k.writes)),
                phase=phase,
                kind=row.kind,
                role=row.role,
                bytes_read=row.bytes_read,
                bytes_written=row.bytes_written,
                flops=row.flops,
                itemsize=sizes.dtype.itemsize,
                size=_size(schedule.plan, k, sizes.tokens) if row.kind == GEMM else None,
                heading=names.short(listing.contraction(k)),
                writes=tuple(names.short(listing.written(w)) for w in k.writes),
                formulas=tuple(("", "its partials combined") if n == f else (n, f)
                               for n, f in formulas),
            )
        )  # fmt: skip
    return found


def _size(plan: Plan, kernel: Kernel, tokens: int) -> tuple[int, int, int]:
    node = plan.nodes[kernel.root]
    a = plan.nodes[kernel.reads[0]].type
    m, inner = (tokens if r == "M" else int(r) for r in (node.type.rows, a.rows))
    return m, int(node.type.cols), inner if node.attr("layout") == "tn" else int(a.cols)


def _joins(call: RegionCall, plan: Plan, sizes: Sizes) -> list[KernelFact]:
    found = []
    for out in plan.outputs:
        parts = {m.columns for m in call.made if m.output == out.name and m.columns is not None}
        type_ = plan.nodes[out.node].type
        if len(parts) > 1 and type_.kind is Kind.TILE:
            size = sizes.tokens * int(type_.cols) * sizes.dtype.itemsize
            found.append(
                KernelFact(f"d_{out.name}", BACKWARD, MEMORY, "join", size, size, 0,
                           sizes.dtype.itemsize, formulas=((f"d_{out.name}", "cat_cols(dq, dk, dv)"
                           if len(parts) == 3 else "its parts side by side"),))
            )  # fmt: skip
    return found


class _Names:
    """Short names of a Plan's inputs: 'gate_proj.weight'."""

    def __init__(self, plan: Plan, shared_names: dict[str, str]) -> None:
        own = {theirs: mine for mine, theirs in shared_names.items()}
        found: dict[str, str] = {}
        for i in plan.inputs:
            found[i.name] = self._free(own[i.name], set(found.values()))
        self.found = found | {f"d_{n}": f"d_{s}" for n, s in found.items()}
        words = sorted(map(re.escape, self.found), key=len, reverse=True)
        self.pattern = re.compile(rf"\b({'|'.join(words)})\b") if words else None

    def _free(self, name: str, taken: set[str]) -> str:
        match = re.search(r"_modules_(.+?)_+(?:parameters|buffers)_+(\w+?)_*$", name)
        if match is None:
            return "rope" if name.startswith("rope_") else name.removeprefix("in_")
        path = [p for p in re.split(r"_*modules_+", match[1]) if p]
        for depth in range(1, len(path) + 1):
            short = ".".join([*path[-depth:], match[2]])
            if short not in taken:
                return short
        return name

    def short(self, text: str) -> str:
        return self.pattern.sub(lambda m: self.found[m[1]], text) if self.pattern else text
