"""What each stage of a verification does with one case.

A check makes its calls through :mod:`.calls`, judges what comes back, and returns what it found or
raises a :class:`~codetta.author.calls.Fault`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import codetta
from codetta.author import oracle
from codetta.author.calls import Caller, Fault, expected_shapes, guarded, poison, same_bits
from codetta.author.draws import Case, Inputs, generator, inputs
from codetta.author.judge import Judged, judge
from codetta.author.power import Outcome
from codetta.backends.layout import default_tile
from codetta.language.meaning import FP8, stored
from codetta.language.primitives import COL_REDUCTIONS, REDUCTION
from codetta.language.program import Program
from codetta.language.values import Node


@dataclass(frozen=True)
class Found:
    """Nothing wrong: the tensors judged, facts for the report, outputs with bounds."""

    judged: tuple[Judged, ...]
    facts: Mapping[str, object] = field(default_factory=dict)
    outcome: Outcome | None = None


Check = Callable[[Caller, Case, int, torch.device], Found]
CHECK: dict[str, Check] = {}
FIX = {
    "integers": "compare the formula with the program line by line; integers leave no rounding",
    "workloads": "compare the formula with the program line by line",
    "fuzz": "look at what depends on the sizes: means, masks, constants that are numbers of rows",
    "special": "look at the terms that overflow, divide by zero or multiply an infinity by 0",
    "tiles": "a reduction is used or combined in a way that depends on the tile",
    "gradients": "the forward is right: look for a constant, a comparison or a round_to where the "
    "formula has a derivative",
}


def _check(name: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECK[name] = check
        return check

    return register


# --------------------------------------------------------------------------------- outputs
@_check("workloads")
def workloads(caller: Caller, case: Case, seed: int, device: torch.device) -> Found:
    return _values(caller, case, seed, device)


@_check("fuzz")
def fuzz(caller: Caller, case: Case, seed: int, device: torch.device) -> Found:
    return _values(caller, case, seed, device)


@_check("special")
def special(caller: Caller, case: Case, seed: int, device: torch.device) -> Found:
    return _values(caller, case, seed, device, lenient=True)


def _values(
    caller: Caller, case: Case, seed: int, device: torch.device, *, lenient: bool = False
) -> Found:
    x = inputs(caller.task, case, seed, device)
    made = guarded(caller, case, x)
    bounds = expected(caller, x, seed, lenient=lenient)
    if bounds is None:
        return Found(())
    judged = _judged(caller, made, bounds)
    kept = not lenient and x.a.shape[0] > 1 and case.layout != "expanded"
    return Found(judged, outcome=(made, bounds) if kept else None)


def expected(
    caller: Caller, x: Inputs, seed: int, *, lenient: bool = False
) -> dict[str, oracle.Bound] | None:
    """Bounds of the outputs; None if there are no rows and the reference makes nothing of that."""
    try:
        return oracle.outputs(caller.task, x, seed, lenient=lenient)
    except (RuntimeError, IndexError):
        if x.a.shape[0]:
            raise
        return None


def _judged(
    caller: Caller, made: Mapping[str, Tensor], bounds: Mapping[str, oracle.Bound]
) -> tuple[Judged, ...]:
    tile = default_tile(caller.program)
    judged = tuple(judge(name, made[name], bound, tile) for name, bound in bounds.items())
    wrong = [j for j in judged if j.reason]
    if wrong:
        first = max(wrong, key=lambda j: j.error.ratio)
        raise Fault("values", first.reason, judged=(first, *(j for j in judged if j is not first)))
    return judged


# -------------------------------------------------------------------------------- integers
#: Primitives that make whole numbers of whole numbers, without rounding.
_EXACT = frozenset({
    "acc", "const", "operand", "extent", "neg", "abs", "relu", "add", "sub", "mul", "maximum",
    "minimum", "lt", "le", "gt", "ge", "eq", "ne", "where", "broadcast", "unpack", "pack",
    "group_sum", "ungroup", "onehot", "select", "rowsum", "rowmax", "colsum", "colmax", "totalsum",
    "round_to",
})  # fmt: skip
_LARGEST = 2.0**22  # whole numbers below are exact in fp32, and so were their terms


@_check("integers")
def integers(caller: Caller, case: Case, seed: int, device: torch.device) -> Found:
    x = inputs(caller.task, case, seed, device)
    made = guarded(caller, case, x)
    bounds = expected(caller, x, seed)
    assert bounds is not None
    judged = _judged(caller, made, bounds)
    exact = exact_outputs(caller.program, rounds=x.a.dtype.itemsize < 4)
    sure = [
        name
        for name in made
        if name in exact and float(bounds[name].exact[0].abs().max()) < _LARGEST
    ]
    for name in sure:
        value = bounds[name].exact[0].reshape(made[name].shape)
        if not torch.equal(made[name].double(), stored(value, made[name].dtype).double()):
            strict = oracle.Bound([stored(value, made[name].dtype).double()])
            found = judge(name, made[name], strict, default_tile(caller.program))
            reason = f"{name} is not exact on inputs of -1, 0 and 1, where nothing is rounded"
            raise Fault("values", reason, judged=(found,))
    facts = {"bit-exact": ", ".join(sure)} if sure else {"within budget": "no output is exact"}
    return Found(judged, facts)


def exact_outputs(program: Program, rounds: bool) -> set[str]:
    """Outputs that are whole numbers, or eighths, where the inputs are; ``rounds``: ``round_to``
    may round them."""

    def exact(node: Node) -> bool:
        if node.op == "const":
            return float(8 * node.attr("value")).is_integer() and abs(node.attr("value")) <= 64
        if node.op == "round_to":
            return not rounds and node.attr("dtype") in ("operand", "accumulator", "fp32", "fp64")
        return node.op in _EXACT

    return {
        o.name
        for o in program.outputs
        if all(exact(program.nodes[i]) for i in program.reachable(o.node))
    }


# ----------------------------------------------------------------------------------- tiles
@_check("tiles")
def tiles(caller: Caller, case: Case, seed: int, device: torch.device) -> Found:
    """Right under another tile; and the raw partials combine to what they do under one tile."""
    x = inputs(caller.task, case, seed, device)
    made = guarded(caller, case, x)
    bounds = expected(caller, x, seed)
    assert bounds is not None
    judged = _judged(caller, made, bounds)
    program = caller.program
    if not program.reductions:
        return Found(judged)
    whole = (x.a.shape[0], -(-x.b.shape[1] // program.granule) * program.granule)
    ours, right = (_combined(caller, x, tile) for tile in (case.tile, whole))
    for name, value in right.items():
        off = oracle.norm(oracle.finite(ours[name] - value))
        if off > 1e-3 * oracle.norm(oracle.finite(value)) + 1e-6:
            raise Fault("values", f"the partials of {name} depend on the tile {case.tile}")
    return Found(judged, {"partials": len(right)})


def _combined(caller: Caller, x: Inputs, tile: tuple[int, int] | None) -> dict[str, Tensor]:
    """Each reduction by the name of its partial, combined in fp64 from the partials of a call."""
    program = caller.program
    a, b, operands = x.call(caller.task)
    made = codetta.gemm(a, b, program, tile=tile, raw=True, **operands)
    only = len(program.partial_names) == 1 and not program.stores and program.bare
    found = {}
    for i, name in program.partial_names.items():
        node = program.nodes[i]
        raw = made if only else getattr(made, name)
        parts = [p.double() for p in (raw if isinstance(raw, tuple) else (raw,))]
        if node.op == "totalsum":
            found[name] = parts[0].sum()
        elif node.op in COL_REDUCTIONS:
            found[name] = REDUCTION[node.op].combine(*(p.T for p in parts))
        else:
            found[name] = REDUCTION[node.op].combine(*parts)
    return found


# ------------------------------------------------------------------------------- gradients
@_check("gradients")
def gradients(caller: Caller, case: Case, seed: int, device: torch.device) -> Found:
    """Random upstream on every output; twice through the same graph; then some outputs and some
    inputs alone."""
    x = inputs(caller.task, case, seed, device)
    names = oracle.wanted(caller.task)
    outputs = [n for n, (_, d) in expected_shapes(caller.task, x).items() if d not in FP8]
    every = _differentiated(caller, case, x, seed, names, outputs)
    g = generator(seed, f"subsets of {case.name}")
    some = [n for n in names if torch.rand((), generator=g) < 0.5] or [names[0]]
    active = [n for n in outputs if torch.rand((), generator=g) < 0.5] or outputs[:1]
    _differentiated(caller, case, x, seed, some, active)
    return every


def _differentiated(
    caller: Caller, case: Case, x: Inputs, seed: int, names: Any, active: list[str]
) -> Found:
    shapes = expected_shapes(caller.task, x)

    def upstream(i: int) -> dict[str, Tensor]:
        g = generator(seed, f"upstream {i} of {case.name}")
        drawn = {n: torch.randn(s, generator=g).to(x.a.device, d) for n, (s, d) in shapes.items()}
        return {n: drawn[n] for n in active}

    made = _gradients(caller, case, x, upstream(0), names)
    try:
        bounds = oracle.gradients(caller.task, x, upstream, seed)
    except (RuntimeError, IndexError):
        if x.a.shape[0]:
            raise
        return Found(())
    judged = _judged(
        caller,
        {f"gradient of {n}": d for n, d in made.items()},
        {f"gradient of {n}": bounds[n] for n in made},
    )
    return Found(judged)


def _gradients(
    caller: Caller, case: Case, x: Inputs, upstream: Mapping[str, Tensor], names: Any
) -> dict[str, Tensor]:
    leaves = x.map(
        lambda name, t: t.detach().requires_grad_(name in names and t.is_floating_point())
    )
    poison(caller.task, x)
    made = caller(leaves, tile=case.tile)
    arrays = [leaves.tensors()[n] for n in names]
    pairs = [(made[n], d) for n, d in upstream.items() if made[n].requires_grad]
    if not pairs:
        return {n: torch.zeros_like(t) for n, t in zip(names, arrays, strict=True)}
    grads = [
        torch.autograd.grad(
            [y for y, _ in pairs],
            arrays,
            [d for _, d in pairs],
            retain_graph=not last,
            allow_unused=True,
        )
        for last in (False, True)
    ]
    for name, first, second in zip(names, *grads, strict=True):
        if (first is None) != (second is None) or (
            first is not None and not same_bits(first, second)
        ):
            raise Fault("determinism", f"the gradient of {name} differs in a second backward")
    return {
        n: torch.zeros_like(t) if d is None else d
        for n, t, d in zip(names, arrays, grads[0], strict=True)
    }
