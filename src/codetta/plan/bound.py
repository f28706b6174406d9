"""A schedule for one class of inputs, written out as a function.

Inputs that agree in shapes, strides, dtypes, alignment and device lead to the same kernels, on
memory of the same sizes, step by step. So what a step asks anew in each run (which kernel, what
must be copied, where a vector lies) is asked once, and a run is a key, a look-up and a function
without loops and branches,

    def run(t):                               # t: the inputs, flat
        v0, v1, r2, = t
        t.clear()
        v3, v4, = k0(v0, v1.mT, (r2, ))       # a GEMM with its program
        del v0, v1
        r5, = k1((v4, ))                      # its finalizer
        ...
        return [v3, r5]

whose constants are what a backend binds (:class:`codetta.backends.select.Binding`). Small models
are bound by this time: on one core a function takes a quarter of what the steps take.

A class is bound when it comes a second time: shapes that never repeat are not worth the writing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from codetta.backends.select import Binding, Bound

if TYPE_CHECKING:
    from codetta.plan.sides import Sides

#: Flat inputs, in a list that is emptied -> the schedule's results.
Function = Callable[[list[Any]], list[Tensor]]
#: Slots, with shapes.
Shapes = Iterable[tuple[int, tuple[int, ...]]]
_KEPT = 256


class Bindings:
    """The functions of one executable, by class of inputs.

    Args:
        count: number of flat inputs.
        packs: weights that may lie side by side, and which inputs they are.
    """

    def __init__(self, count: int, packs: Iterable[tuple[Sides, Sequence[int]]]) -> None:
        self._key = _key(count, tuple(packs))
        self._known: dict[Hashable, Function | None] = {}

    def key(self, inputs: Sequence[Tensor], backend: Binding) -> Hashable:
        """What decides how the steps run."""
        return backend.setting(), self._key(inputs)

    def find(self, key: Hashable) -> Function | None:
        """The function of a class."""
        return self._known.get(key)

    def is_due(self, key: Hashable) -> bool:
        """Whether the class came before."""
        if key in self._known:
            return True
        if len(self._known) >= _KEPT:  # shapes that never end: start over
            self._known.clear()
        self._known[key] = None
        return False

    def keep(self, key: Hashable, function: Function) -> None:
        self._known[key] = function


def _key(
    count: int, packs: tuple[tuple[Sides, Sequence[int]], ...]
) -> Callable[[Sequence[Tensor]], tuple[Hashable, ...]]:
    """One expression: a loop over the inputs would take twice the time."""
    tensors = [f"t[{i}]" for i in range(count)]
    parts = [f"{x}.shape, {x}.stride(), {x}.dtype, {x}.data_ptr() % 16" for x in tensors]
    scope: dict[str, Any] = {}
    for k, (sides, at) in enumerate(packs):
        scope[f"k{k}"] = lambda t, sides=sides, at=at: _place(sides.whole([t[i] for i in at]))
        memory = (f"t[{i}].untyped_storage()._cdata" for i in at[:2])
        parts.append(f"None if {' != '.join(memory)} else k{k}(t)")
    made: Callable[..., tuple[Hashable, ...]] = eval(
        f"lambda t: (t[0].device, {', '.join(parts)})", scope
    )
    return made


def _place(whole: Tensor | None) -> int | None:
    return None if whole is None else whole.data_ptr() % 16


class Writer:
    """The text of a function and its constants.

    A value is named after its slot: ``v5`` in the two dimensions in which kernels read it, ``r5``
    with fewer, as it came or as a kernel returned it.

    Args:
        inputs: slots of the inputs, with the tensors.
        shapes: of those that kernels read in another shape.
    """

    def __init__(self, inputs: Sequence[tuple[int, Tensor]], shapes: Shapes) -> None:
        self._lines: list[str] = []
        self._scope: dict[str, Any] = {}
        self._names: set[str] = set()
        given, read = dict(inputs), dict(shapes)
        #: Shapes of two dimensions, by slot of what has fewer.
        self._fewer = {s: x for s, x in read.items() if given[s].ndim < len(x)}
        self._assign((slot for slot, _ in inputs), "t")
        self._lines.append("t.clear()")
        for slot, shape in read.items():
            if slot not in self._fewer and not given[slot].ndim == len(shape) == 1:
                self.write(slot, f"v{slot}.reshape({shape})")

    def constant(self, value: Any) -> str:
        name = f"k{len(self._scope)}"
        self._scope[name] = value
        return name

    def read(self, slot: int) -> str:
        """Text of a value as kernels read it."""
        name = f"v{slot}"
        if name not in self._names:
            self._names.add(name)
            self._lines.append(f"{name} = r{slot}.reshape({self._fewer[slot]})")
        return name

    def call(self, bound: Bound, slots: Sequence[int], *sides: str) -> str:
        """Text of a call on ``sides`` and a tuple of values."""
        values = [
            f"r{s}" if i in bound.flat and f"r{s}" in self._names else self.read(s)
            for i, s in enumerate(slots)
        ]
        given = (*sides, f"({''.join(f'{x}, ' for x in values)})")
        return f"{self.constant(bound.run)}({', '.join(given)})"

    def write(self, slot: int, text: str) -> None:
        self._names.add(f"v{slot}")
        self._lines.append(f"v{slot} = {text}")

    def unpack(self, slots: Sequence[tuple[int, tuple[int, ...] | None]], text: str) -> None:
        """Values of a list; with a shape where a kernel returns them with fewer dimensions."""
        self._fewer |= {s: shape for s, shape in slots if shape is not None}
        self._assign((slot for slot, _ in slots), text)

    def drop(self, slots: Sequence[int]) -> None:
        names = [n for s in slots for n in (f"v{s}", f"r{s}") if n in self._names]
        self._names.difference_update(names)
        if names:
            self._lines.append(f"del {', '.join(names)}")

    def made(self, results: Iterable[tuple[int, tuple[int, ...] | None]]) -> Function:
        """The function; vectors and numbers among the results with their shapes."""
        self._lines.append(f"return [{', '.join(self._result(*r) for r in results)}]")
        exec(_code("def run(t):\n" + "".join(f"    {x}\n" for x in self._lines)), self._scope)
        run: Function = self._scope["run"]
        return run

    def _result(self, slot: int, shape: tuple[int, ...] | None) -> str:
        if f"r{slot}" in self._names:
            return f"r{slot}"
        return f"v{slot}" if shape is None else f"v{slot}.reshape({shape})"

    def _assign(self, slots: Iterable[int], text: str) -> None:
        names = [f"r{s}" if s in self._fewer else f"v{s}" for s in slots]
        self._names.update(names)
        self._lines.append(f"{''.join(f'{n}, ' for n in names)}= {text}")


@lru_cache(maxsize=1024)
def _code(text: str) -> CodeType:
    return compile(text, "<codetta plan>", "exec")
