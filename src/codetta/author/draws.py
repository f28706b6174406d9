"""Random inputs of a task: by size, distribution, memory layout and special value.

Everything follows from a seed. :func:`drawn` gives plain arrays of a task's distributions, for
timing; :func:`inputs` the arrays of one :class:`Case`, and from them what ``codetta.gemm`` takes
and what the task's reference takes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from codetta.author.layouts import LAYOUTS
from codetta.author.special import SPECIAL
from codetta.author.task import Task, TaskOperand, Workload

_POSITIONS = 61  # rows of a rotary table


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        name: "STAGE/WHAT", unique in a verification; with the seed it determines the data.
        workload: sizes and dtype.
        lead: leading dimensions of a, whose product is m; () for (m,).
        layout: of all arrays in memory, see :mod:`codetta.author.layouts`.
        values: "drawn", "integers", or a name of :data:`codetta.author.special.SPECIAL`.
        tile: given to ``codetta.gemm``.
    """

    name: str
    workload: Workload
    lead: tuple[int, ...] = ()
    layout: str = "plain"
    values: str = "drawn"
    tile: tuple[int, int] | None = None

    @property
    def described(self) -> str:
        parts = [str(self.workload)]
        parts += [f"lead {self.lead}"] if self.lead else []
        parts += [x for x in (self.layout, self.values) if x not in ("plain", "drawn")]
        parts += [f"tile {self.tile}"] if self.tile else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Inputs:
    """a (m, k), b (k, n) and operands, each row-indexed array with m rows in its first axis."""

    a: Tensor
    b: Tensor
    operands: Mapping[str, Any]
    lead: tuple[int, ...] = ()

    def tensors(self) -> dict[str, Tensor]:
        """All arrays by name, both parts of a rotary operand."""
        found = {"a": self.a, "b": self.b}
        for name, x in self.operands.items():
            parts = x if isinstance(x, tuple) else (x,)
            found |= {name if len(parts) == 1 else f"{name}[{i}]": p for i, p in enumerate(parts)}
        return found

    def map(self, f: Callable[[str, Tensor], Tensor]) -> Inputs:
        """``f(name, array)`` of every array, those of one operand under one name."""

        def of(name: str, x: Any) -> Any:
            return tuple(f(name, p) for p in x) if isinstance(x, tuple) else f(name, x)

        operands = {name: of(name, x) for name, x in self.operands.items()}
        return replace(self, a=f("a", self.a), b=f("b", self.b), operands=operands)

    def call(self, task: Task) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """As ``codetta.gemm`` takes them: rows in the shape of ``lead``."""
        if not self.lead:
            return self.a, self.b, dict(self.operands)
        rows = {o.name for o in task.operands if o.kind in ("tile", "col", "index")}
        operands = dict(self.operands)
        for o in task.operands:
            x = operands[o.name]
            if o.name in rows:
                operands[o.name] = x.reshape(self.lead + tuple(x.shape[1:]))
            elif o.kind == "rotary":
                operands[o.name] = (x[0], x[1].reshape(self.lead))
        return self.a.reshape(self.lead + tuple(self.a.shape[1:])), self.b, operands


def generator(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """Of one purpose: different names give independent streams of one seed."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


def drawn(
    task: Task, w: Workload, seed: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """a (m, k), b (k, n) / sqrt(k) and the operands in the task's distributions."""
    made = _drawn(task, w, generator(seed, f"draw {w}", device))
    return made.a, made.b, dict(made.operands)


def inputs(task: Task, case: Case, seed: int, device: torch.device | str = "cpu") -> Inputs:
    """Of one case; the same numbers on every device."""
    g = generator(seed, case.name)
    made = _drawn(task, case.workload, g)
    if case.values == "integers":
        made = _integers(task, made, g)
    elif case.values != "drawn":
        made = _special(task, made, SPECIAL[case.values], g)
    place = LAYOUTS[case.layout]
    return replace(made.map(lambda _, x: place(x.to(device))), lead=case.lead)


# ------------------------------------------------------------------------- distributions
def _drawn(task: Task, w: Workload, g: torch.Generator) -> Inputs:
    own = getattr(torch, w.dtype)
    a, b = _normal(g, w.m, w.k), _normal(g, w.k, w.n) / max(w.k, 1) ** 0.5
    operands = {o.name: _operand(task, o, w, g, own) for o in task.operands}
    return Inputs(a.to(own), b.to(own), operands)


def _normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, device=g.device)


def _uniform(g: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=g, device=g.device)


def _index(g: torch.Generator, m: int, n: int) -> Tensor:
    """Columns; one in eight is none: -100, n or n + 1."""
    inside = torch.randint(0, max(n, 1), (m,), generator=g, device=g.device)
    outside = torch.tensor([-100, n, n + 1], device=g.device)
    chosen = outside[torch.randint(0, 3, (m,), generator=g, device=g.device)]
    return torch.where(_uniform(g, m) < 0.125, chosen, inside)


_DRAW: dict[str, Callable[..., Tensor]] = {
    "normal": lambda g, *s: _normal(g, *s),
    "positive": lambda g, *s: _normal(g, *s).abs() + 0.1,
    "mask": lambda g, *s: (_uniform(g, *s) < 0.5).float(),
    "keep": lambda g, *s: (_uniform(g, *s) < 0.9).float() / 0.9,
    "scale": lambda g, *s: 2.0 ** (-4 * _uniform(g, *s)),
    "gain": lambda g, *s: 64 + 192 * _uniform(g, *s),
    "position": lambda g, *s: torch.arange(
        s[0] if s else 1, dtype=torch.float32, device=g.device
    ).reshape(s),
    "zeros": lambda g, *s: torch.zeros(s, device=g.device),
}


def shape(o: TaskOperand, w: Workload) -> tuple[int, ...]:
    columns = int(w.n * o.width)
    return {"tile": (w.m, columns), "row": (columns,), "scalar": ()}.get(o.kind, (w.m,))


def _operand(task: Task, o: TaskOperand, w: Workload, g: torch.Generator, own: torch.dtype) -> Any:
    if o.kind == "index":
        return _index(g, w.m, w.n)
    dtype = getattr(torch, o.dtype) if o.dtype else own
    if o.kind == "rotary":
        angles = 3 * _normal(g, _POSITIONS, int(task.constants["rotary_dim"]) // 2)
        table = torch.cat((angles.cos(), angles.sin()), 1).to(dtype)
        return table, torch.randint(0, _POSITIONS, (w.m,), generator=g, device=g.device)
    return _DRAW[o.values](g, *shape(o, w)).to(dtype)


# -------------------------------------------------------------------------- other values
def _integers(task: Task, made: Inputs, g: torch.Generator) -> Inputs:
    """-1, 0 and 1 in place of real numbers, so that products and sums are exact in any dtype.

    Positive distributions become 1 and 2, masks stay masks, quantization scales powers of two.
    """
    kept = {"mask": (0, 1), "keep": (0, 1), "positive": (1, 2), "scale": (1, 2), "gain": (1, 2)}
    chosen = {o.name: kept.get(o.values, (-1, 1)) for o in task.operands}
    as_is = {o.name for o in task.operands if o.values in ("position", "angles", "zeros")}

    def one(name: str, x: Tensor) -> Tensor:
        if name in as_is or not x.is_floating_point():
            return x
        low, high = chosen.get(name, (-1, 1))
        return torch.randint(low, high + 1, x.shape, generator=g).to(x.dtype)

    return made.map(one)


def _special(
    task: Task, made: Inputs, change: Callable[..., Tensor | None], g: torch.Generator
) -> Inputs:
    """The arrays, each as ``change(kind, values, x, n, generator)`` has it, None for as drawn."""
    kinds = {o.name: (o.kind, o.values) for o in task.operands} | {"a": ("a", ""), "b": ("b", "")}
    n = made.b.shape[1]

    def one(name: str, x: Tensor) -> Tensor:
        kind, values = kinds[name]
        changed = None if kind == "rotary" else change(kind, values, x, n, g)
        return x if changed is None else changed.to(x.dtype)

    return made.map(one)
