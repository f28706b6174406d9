"""The warm call: one function per description, generated.

Between its two memory allocations and its launch a call has nothing to decide: which buffers there
are, what each parameter is made of and what becomes of the buffers is known from the description.
So it is written out as a Python function without loops and branches,

    def run(a, b, t):                     # t: the operands
        d = empty(k0, k1, k2)             # shape, strides, dtype
        s_ssq = empty(k3, k4, k5)
        launch(k6, a, b, d, None, {'x0': t[0], 'ssq': s_ssq})
        return [d, *finish((s_ssq, t[1]), k7, k8)]

whose constants hold all sizes. Its text has none, so that it is compiled once per program and class
of arrays, and a new M costs a dictionary of constants. On one core this takes a third of the time
of loops over the description.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from codetta.backends.cuda import arrays
from codetta.backends.cuda.capture import capturing
from codetta.backends.cuda.feeds import Fixed, Inline, itself, positions
from codetta.backends.cuda.finalize import finalizer
from codetta.backends.layout import results
from codetta.language.program import Program
from codetta.language.types import Kind

if TYPE_CHECKING:
    from codetta.backends.cuda.assembly import Call

P = ParamSpec("P")
T = TypeVar("T")
#: (a, b, operands) -> the flat results.
Run = Callable[[Tensor, Tensor, Sequence[Tensor]], list[Tensor]]
#: (operands, m, n) -> outputs of a finalizer.
Finish = Callable[[Sequence[Tensor], int, int], list[Tensor]]
#: Memory that results may take: (position among them, which operand, its shape, its dtype).
Offers = tuple[tuple[int, int, torch.Size, torch.dtype], ...]


def bind(
    call: Call,
    raw: bool,
    finish: Finish | None,
    offers: Offers = (),
    flat: frozenset[int] = frozenset(),
) -> Run:
    """The function of a compiled description; ``finish`` runs the finalizer of its program.

    ``flat``: operands that come one-dimensional, see :func:`vectors`.
    """
    return _Writer(call, raw, finish, offers, flat).made()


def vectors(call: Call, raw: bool) -> frozenset[int]:
    """Operands that a bound call may take one-dimensional: the kernel reads them, nobody else."""
    if not raw and finalizer(call.lowered.program) is not None:
        return frozenset()
    feeds, at = dict(call.feeds), positions(call.lowered.program)
    found: dict[int, bool] = {}
    for load in call.lowered.loads:
        if load.operand in at:
            i, feed = at[load.operand], feeds.get(load.name)
            alone = isinstance(feed, Inline) and feed.vector == i
            found[i] = found.get(i, True) and alone
    return frozenset(i for i, alone in found.items() if alone)


def offered(into: Mapping[int, Tensor], operands: Sequence[Tensor]) -> Offers:
    """What :class:`codetta.backends.select.Backend` calls ``into``, without the tensors."""
    return tuple(
        (position, i, x.shape, x.dtype)
        for position, x in into.items()
        for i, operand in enumerate(operands)
        if operand is x and x.is_contiguous()
    )


def on_device(run: Callable[P, T], device: torch.device) -> Callable[P, T]:
    """``run`` with its device current; where there is only one, that is always so."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return run
    index = device.index

    def guarded(*arguments: P.args, **named: P.kwargs) -> T:
        if torch.cuda.current_device() == index:
            return run(*arguments, **named)
        with torch.cuda.device(index):
            return run(*arguments, **named)

    return guarded


class _Writer:
    """Writes the text and collects its constants."""

    def __init__(
        self,
        call: Call,
        raw: bool,
        finish: Finish | None,
        offers: Offers,
        flat: frozenset[int],
    ) -> None:
        self.call, self.raw, self.finish, self.offers = call, raw, finish, offers
        self.flat = flat
        self.program = call.lowered.program
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {
            "empty": arrays.allocator(call.device), "launch": call.launch,
        }  # fmt: skip

    def constant(self, value: Any) -> str:
        name = f"k{len(self.scope)}"
        self.scope[name] = value
        return name

    def made(self) -> Run:
        self._prepare_and_launch()
        stored = {output: self._stored(memory) for output, memory in self.call.stores}
        parts = self._raw_results(stored) if self.raw else self._results(stored)
        text = ", ".join(parts)
        self.lines.append(
            f"return unshared([{text}])" if self.raw and self.call.shared else f"return [{text}]"
        )
        self.scope["unshared"] = unshared
        body = "".join(f"    {line}\n" for line in self.lines)
        exec(_code(f"def run(a, b, t):\n{body}"), self.scope)
        run: Run = self.scope["run"]
        return run

    # ---- up to the launch
    def _prepare_and_launch(self) -> None:
        call = self.call
        arguments = {name: self._fed(feed) for name, feed in call.feeds}
        for sink in call.sinks:
            arguments[sink.name] = self._empty(f"s_{sink.name}", sink)
        for sink_name, index_name in call.selects:
            arguments[index_name] = self._line(f"i_{index_name}", arguments[index_name])
            call_text = f"{self.constant(call.start_select)}({{}}, {{}})"
            self.lines.append(call_text.format(arguments[sink_name], arguments[index_name]))
        d = "None"
        for _, memory in call.stores:
            place = None if memory.name else self._place(memory)
            if place is not None:
                d = self._line("d", place)
                continue
            name = self._empty(f"o_{memory.name}" if memory.name else "d", memory)
            if memory.columns is not None and not memory.whole:
                self._line(name, f"{self.constant(memory.kept)}({name})")
            if memory.name:
                arguments[memory.name] = name
            else:
                d = name
        given = ", ".join(f"{name!r}: {text}" for name, text in arguments.items())
        c = self._fed(call.feed_c) if call.feed_c is not None else "None"
        sides = [
            side if feed is itself else f"{self.constant(feed)}({side})"
            for side, feed in (("a", call.feed_a), ("b", call.feed_b))
        ]
        plan = self.constant(call.plan)
        self.lines.append(f"launch({plan}, {sides[0]}, {sides[1]}, {d}, {c}, {{{given}}})")

    def _place(self, d: Any) -> str | None:
        """C, if D may overwrite it: the epilogue loads each subtile of C before it stores D's."""
        if not isinstance(self.call.feed_c, Inline) or d.columns is not None:
            return None
        output = next(name for name, memory in self.call.stores if memory is d)
        parts = ((r.name, max(1, len(r.components))) for r in results(self.program, self.raw))
        names = [name for name, count in parts for _ in range(count)]
        for position, i, shape, dtype in self.offers:
            text = f"t[{i}]"
            alike = shape == d.shape and dtype is d.dtype
            if names[position] == output and alike and self.call.feed_c.text == text:
                return text
        return None

    def _line(self, name: str, text: str) -> str:
        if name != text:
            self.lines.append(f"{name} = {text}")
        return name

    def _fed(self, feed: Callable[..., Any]) -> str:
        if isinstance(feed, Inline):
            return f"t[{feed.vector}]" if feed.vector in self.flat else feed.text
        if isinstance(feed, Fixed) and not capturing():
            return self.constant(feed.make())
        return f"{self.constant(feed)}(t)"

    def _empty(self, name: str, memory: Any) -> str:
        given = (memory.shape, arrays.row_major(memory.shape), memory.dtype)
        return self._line(name, f"empty({', '.join(map(self.constant, given))})")

    # ---- after it
    def _stored(self, memory: Any) -> str:
        name = f"o_{memory.name}" if memory.name else "d"
        if memory.columns is None:
            return name
        if memory.whole:
            name = f"{self.constant(memory.kept)}({name})"
        return f"{name}.contiguous()"

    def _partials(self) -> dict[tuple[int, int], str]:
        """Texts of the raw partials by reduction node and component."""
        found: dict[tuple[int, int], str] = {}
        shapes = {sink.name: sink.shape for sink in self.call.sinks}
        for p in self.call.lowered.partials:
            buffers = [f"s_{name}" for name in p.sinks]
            rank = len(shapes[p.sinks[0]])
            if p.how == "same" and rank < 3:
                found[p.node, 0] = buffers[0] if rank == 2 else f"{buffers[0]}.unsqueeze(1)"
                continue
            parts = self.constant(self.call.parts)
            made = f"{parts}({self.constant(p)}, [{', '.join(buffers)}])"
            name = self._line(f"p_{p.node}", made)
            for component in range(self.call.components(p)):
                found[p.node, component] = f"{name}[{component}]"
        return found

    def _raw_results(self, stored: dict[str, str]) -> list[str]:
        partials, texts = self._partials(), []
        node_of = {name: node for node, name in self.program.partial_names.items()}
        for r in results(self.program, True):
            if not r.components:
                texts.append(stored[r.name])
                continue
            texts += [partials[node_of[r.name], c] for c in range(len(r.components))]
        return texts

    def _results(self, stored: dict[str, str]) -> list[str]:
        finals = finalizer(self.program)
        if finals is None:
            return [stored[o.name] for o in self.program.outputs]
        assert self.finish is not None
        partials, at = self._partials(), _places(self.program)
        arrays: list[str] = []
        for read in finals.reads:
            arrays += at[read] if isinstance(read, str) else [partials[read]]
        finish, m, n = (self.constant(x) for x in (self.finish, *self.call.sizes))
        self.lines.append(f"made = {finish}([{', '.join(arrays)}], {m}, {n})")
        final = {o.name: f"made[{i}]" for i, o in enumerate(finals.program.outputs)}
        named = stored | final
        return [named[o.name] for o in self.program.outputs]


def _places(program: Program) -> dict[str, list[str]]:
    """Texts of the operands' tensors; a rotary operand is two."""
    found: dict[str, list[str]] = {}
    i = 0
    for o in program.operands:
        count = 2 if o.kind is Kind.ROTARY else 1
        found[o.name] = [f"t[{k}]" for k in range(i, i + count)]
        i += count
    return found


@lru_cache(maxsize=4096)
def _code(text: str) -> CodeType:
    return compile(text, "<codetta call>", "exec")


def unshared(flat: list[Tensor]) -> list[Tensor]:
    """Results, each in memory of its own."""
    taken: set[int] = set()
    for i, x in enumerate(flat):
        memory = x.untyped_storage().data_ptr()
        flat[i] = x.clone() if memory in taken else x
        taken.add(memory)
    return flat
