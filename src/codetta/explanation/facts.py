"""The result of `codetta.explain`, as plain data.

JSON schema 1, as :meth:`Explanation.to_dict` gives it; keys may be added, but none will change its
meaning without a new number:

    schema        1
    model         class name or the name that was asked for
    tokens        rows M of the first region; dtype of its matrices; layers (or null), traced_layers
    gpu           name and peak rates behind the estimates
    training      whether the backward is included
    graphs        how many graphs torch.compile made of the call
    totals        {before, after}: {forward, backward}: {gemm, memory, attention}:
                  {kernels, bytes, flops, seconds}
    regions       [label, count, modules, operations (fused, by name), before and after: kernels]
    left          [what, reason, where, count, kernels]; views have no kernels

A kernel is {name, phase, kind, role, bytes_read, bytes_written, flops, seconds, size ([M, N, K] of
a GEMM), heading, writes, formulas ([name, formula]), preparation (true for work on weights only)}.
Totals count every kernel with the count of its region.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from codetta.explanation.gpus import GPUS, Gpu, gpu

FORWARD, BACKWARD = "forward", "backward"
GEMM, MEMORY, ATTENTION = "gemm", "memory", "attention"
PHASES = (FORWARD, BACKWARD)
KINDS = (GEMM, MEMORY, ATTENTION)
SCHEMA = 1


@dataclass(frozen=True)
class KernelFact:
    """One kernel, of PyTorch or of a Plan.

    Attributes:
        kind: 'gemm', 'memory' (bound by memory traffic) or 'attention'.
        role: 'operation' of PyTorch, or a Plan kernel's: 'gemm', 'pointwise', 'finalize',
            'prepare', 'move', 'join'.
        itemsize: bytes of an element of its results.
        size: M, N, K of a contraction.
        heading: the contraction; writes: what leaves the kernel; formulas: what it computes.
    """

    name: str
    phase: str
    kind: str
    role: str
    bytes_read: int
    bytes_written: int
    flops: int
    itemsize: int
    size: tuple[int, int, int] | None = None
    heading: str = ""
    writes: tuple[str, ...] = ()
    formulas: tuple[tuple[str, str], ...] = ()

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    def seconds(self, on: Gpu) -> float:
        """Roofline estimate. Arithmetic of memory-bound kernels costs nothing."""
        flops = 0 if self.kind == MEMORY else self.flops
        return on.seconds(self.bytes, flops, self.itemsize)

    def to_dict(self, on: Gpu) -> dict[str, Any]:
        found = {k: getattr(self, k) for k in ("name", "phase", "kind", "role")}
        found |= {k: getattr(self, k) for k in ("bytes_read", "bytes_written", "flops")}
        found |= {"seconds": self.seconds(on), "size": list(self.size) if self.size else None}
        found |= {"heading": self.heading, "writes": list(self.writes)}
        return found | {
            "formulas": [list(f) for f in self.formulas],
            "preparation": self.role == "prepare",
        }


@dataclass(frozen=True)
class RegionFact:
    """A region, or several equal ones.

    Attributes:
        key: equal regions have equal keys.
        modules: paths of the modules whose weights it multiplies with, in the first of them.
        first: layer number of the first, or None.
        operations: what was fused: PyTorch function and how often, forward.
        before, after: kernels of one of them.
        note: what it is besides products of these modules; '' for most.
    """

    key: str
    label: str
    count: int
    modules: tuple[str, ...]
    first: int | None
    operations: tuple[tuple[str, int], ...]
    before: tuple[KernelFact, ...]
    after: tuple[KernelFact, ...]
    note: str = ""

    def to_dict(self, on: Gpu) -> dict[str, Any]:
        return {
            "label": self.label,
            "count": self.count,
            "modules": list(self.modules),
            "operations": dict(self.operations),
            "before": [k.to_dict(on) for k in self.before],
            "after": [k.to_dict(on) for k in self.after],
        }


@dataclass(frozen=True)
class LeftFact:
    """Operations that were left alone, equal ones together.

    Attributes:
        what: the PyTorch function.
        where: the module, layer numbers left out.
        kernels: of one of them; none for a view.
    """

    what: str
    reason: str
    where: str
    count: int
    kernels: tuple[KernelFact, ...]
    was: tuple[KernelFact, ...]

    @property
    def key(self) -> str:
        return f"{self.what} {self.where} {self.reason} {self.kernels}"

    def to_dict(self, on: Gpu) -> dict[str, Any]:
        found: dict[str, Any] = {"what": self.what, "reason": self.reason, "where": self.where}
        return found | {"count": self.count, "kernels": [k.to_dict(on) for k in self.kernels]}


@dataclass(frozen=True)
class Total:
    """Sums over kernels."""

    kernels: int = 0
    bytes: int = 0
    flops: int = 0
    seconds: float = 0.0

    def __add__(self, other: Total) -> Total:
        return Total(
            self.kernels + other.kernels,
            self.bytes + other.bytes,
            self.flops + other.flops,
            self.seconds + other.seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in ("kernels", "bytes", "flops", "seconds")}


@dataclass(frozen=True)
class Explanation:
    """What CODA makes of a model: see :func:`codetta.explain`.

    Attributes:
        regions, left: in the order of the model.
        layers, traced_layers: how many layers the model has and how many were looked at, where they
            differ; the others are counted like those looked at.
        training: whether anything needed a gradient.
        notes: what else happened to the model.
    """

    model: str
    tokens: int
    dtype: str
    regions: tuple[RegionFact, ...]
    left: tuple[LeftFact, ...]
    training: bool
    graphs: int
    notes: tuple[str, ...] = ()
    layers: int | None = None
    traced_layers: int | None = None
    gpu: Gpu = GPUS["h100"]

    def on(self, name: str) -> Explanation:
        """The same with the roofline of another GPU. Raises UnknownGpu."""
        return replace(self, gpu=gpu(name))

    def kernels(self, when: str) -> Iterator[tuple[KernelFact, int]]:
        """All kernels 'before' or 'after', each with how often it runs."""
        for region in self.regions:
            for k in region.before if when == "before" else region.after:
                yield k, region.count
        for left in self.left:
            for k in left.was if when == "before" else left.kernels:
                yield k, left.count

    def total(self, when: str, phase: str | None = None, kind: str | None = None) -> Total:
        """Sums over kernels 'before' or 'after', of one phase and kind or of all."""
        return total(self.kernels(when), self.gpu, phase, kind)

    def to_dict(self) -> dict[str, Any]:
        """As data for JSON, see this module's docstring."""
        rates = {str(k): v for k, v in self.gpu.matrix.items()}
        return {
            "schema": SCHEMA,
            "model": self.model,
            "tokens": self.tokens,
            "dtype": self.dtype,
            "layers": self.layers,
            "traced_layers": self.traced_layers,
            "gpu": {
                "name": self.gpu.name,
                "bytes_per_s": self.gpu.bandwidth,
                "flops_per_s": rates,
            },
            "training": self.training,
            "graphs": self.graphs,
            "notes": list(self.notes),
            "totals": {
                when: {p: {k: self.total(when, p, k).to_dict() for k in KINDS} for p in PHASES}
                for when in ("before", "after")
            },
            "regions": [r.to_dict(self.gpu) for r in self.regions],
            "left": [x.to_dict(self.gpu) for x in self.left],
        }

    def to_html(self, path: str | Path) -> Path:
        """Write one page that needs nothing else, and return its path."""
        from codetta.explanation.page import page

        target = Path(path)
        target.write_text(page(self), encoding="utf-8")
        return target

    def details(self) -> str:
        """The summary, and every kernel of every region with its formulas."""
        from codetta.explanation.text import details, plain

        return f"{plain(self)}\n\n{details(self)}"

    def __str__(self) -> str:
        from codetta.explanation.text import plain

        return plain(self)

    def __rich__(self) -> Any:
        from codetta.explanation.text import summary

        return summary(self)

    def __repr__(self) -> str:
        return f"<Explanation of {self.model}: {sum(r.count for r in self.regions)} regions>"


def total(
    kernels: Iterable[tuple[KernelFact, int]],
    on: Gpu,
    phase: str | None = None,
    kind: str | None = None,
) -> Total:
    """Sums over kernels with their counts."""
    found = Total()
    for k, count in kernels:
        if phase in (None, k.phase) and kind in (None, k.kind):
            found += Total(count, k.bytes * count, k.flops * count, k.seconds(on) * count)
    return found
