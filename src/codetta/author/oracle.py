"""What a task's outputs and gradients must be near to, and how near; a budget nobody can set.

    ‖out - ref64‖ <= 2 ‖torch - ref64‖ + (2 eps(dtype of out) + 8 eps(fp32)) ‖addends‖

``torch`` is the reference evaluated in the workload's dtype. ``addends`` says how large the terms
were that cancelled in an output: what a relative change of every input of one does to it, to first
order (by forward-mode differentiation), its own size, and what the task names. Of tensors with few
elements one error says little, so both are root mean squares over several inputs near the drawn
ones, and PyTorch's error counts 1 + 2 / sqrt(elements) times, which is 1 for many.

NaN and ±Inf must be where the oracle has them, rounded to the dtype of the output; only under
special values, and only where PyTorch itself disagrees with fp64, may they be where it has them.

An fp8 output is compared with the oracle rounded to fp8, since a rounding of 2^-4 would hide
everything else: it may differ by as many steps as PyTorch's, and by one in 4096 elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from codetta.author.draws import Inputs, generator
from codetta.author.task import Task
from codetta.language.meaning import FP8, NAMED_DTYPES, stored

_FEW = 256  # elements below which an error is averaged over neighbours
_NEIGHBOURS = 8


@dataclass
class Bound:
    """What one tensor must be near to.

    Attributes:
        exact: the oracle's value, fp64; more than one where several are right.
        theirs: ‖torch - exact‖.
        addends: ‖addends‖.
        eps: of what was stored on the way; that of the tensor's dtype if larger.
        classes: values in whose places of NaN and ±Inf the tensor's may be.
    """

    exact: list[Tensor]
    theirs: float = 0.0
    addends: float = 0.0
    eps: float = 0.0
    classes: list[Tensor] = field(default_factory=list)


# ----------------------------------------------------------------------- outputs expected
def evaluate(task: Task, x: Inputs, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The task's reference; in ``dtype``, or each array in its own."""
    if dtype is not None:
        x = x.map(lambda _, t: t.to(dtype) if t.is_floating_point() else t)
    found = task.reference(x.a @ x.b, **x.operands)
    return {o.name: found[o.name] for o in task.outputs}


def outputs(task: Task, x: Inputs, seed: int, *, lenient: bool = False) -> dict[str, Bound]:
    """Bounds of the outputs.

    Args:
        lenient: special values: PyTorch's own NaN and ±Inf count, in any of its dtypes.
    """
    with torch.no_grad():
        exact = evaluate(task, x, torch.float64)
        bounds = {name: Bound([value], classes=[value]) for name, value in exact.items()}
        g = generator(seed, "neighbours")
        few = min((v.numel() for v in exact.values()), default=0) < _FEW
        squares: dict[str, list[tuple[float, float]]] = {name: [] for name in exact}
        for i in range(_NEIGHBOURS if few or _repeats(x) else 1):
            near = _neighbour(x, g) if i else x
            right = evaluate(task, near, torch.float64) if i else exact
            theirs = _stored(task, evaluate(task, near, None), x.a.dtype)
            moved, named = _moved(task, near, g), _named(task, near)
            for name, value in right.items():
                error = _error(theirs[name], _quantized(theirs[name].dtype, value))
                terms = [value, moved[name], *([named[name]] if name in named else [])]
                size = math.hypot(*(norm(finite(t)) for t in terms))
                squares[name].append((error, size))
            if lenient and not i:
                wide = evaluate(task, x, torch.float32)
                for name in exact:
                    bounds[name].classes += [theirs[name], wide[name]]
        for name, pairs in squares.items():
            count = 1 if _repeats(x) else exact[name].numel()
            bounds[name].theirs = _rms([e for e, _ in pairs]) * _tail(count)
            bounds[name].addends = _rms([s for _, s in pairs])
        return bounds


def _repeats(x: Inputs) -> bool:
    """Whether a or b is one vector over and over, so that all elements err alike."""
    return any(0 in t.stride() and t.numel() > 1 for t in (x.a, x.b))


def _neighbour(x: Inputs, g: torch.Generator) -> Inputs:
    """Other inputs of the same kind: each element of a up to 2 % off."""
    change = 1 + 0.02 * (2 * torch.rand(x.a.shape, generator=g) - 1)
    return x.map(lambda name, t: (t * change.to(t.device)).to(t.dtype) if name == "a" else t)


def _named(task: Task, x: Inputs) -> Mapping[str, Tensor]:
    """Sums of absolute addends as the task itself names them: what cancels without a derivative,
    such as the terms of a divergence that is 0."""
    if task.addends is None:
        return {}
    wide = x.map(lambda _, t: t.double() if t.is_floating_point() else t)
    return task.addends(wide.a @ wide.b, **wide.operands)


def _moved(task: Task, x: Inputs, g: torch.Generator) -> dict[str, Tensor]:
    """First-order change of the outputs if all that enters them changes relatively by N(0, 1)."""

    def random(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.device)

    wide = x.map(lambda _, t: t.double() if t.is_floating_point() else t)
    acc = wide.a @ wide.b
    terms = (wide.a.square() @ wide.b.square()).sqrt()  # of acc, as they are added up
    with torch.enable_grad(), forward_ad.dual_level():
        moving = wide.map(
            lambda name, t: (
                forward_ad.make_dual(t, t * random(t))
                if t.is_floating_point() and name not in ("a", "b")
                else t
            )
        )
        try:
            found = task.reference(
                forward_ad.make_dual(acc, terms * random(acc)), **moving.operands
            )
        except (NotImplementedError, RuntimeError):  # no forward-mode rule: the budget is tighter
            found = evaluate(task, wide, None)
        tangents = {o.name: forward_ad.unpack_dual(found[o.name]) for o in task.outputs}
        return {
            name: torch.zeros_like(t.primal) if t.tangent is None else t.tangent.detach()
            for name, t in tangents.items()
        }


# --------------------------------------------------------------------- gradients expected
def gradients(
    task: Task, x: Inputs, upstream: Callable[[int], Mapping[str, Tensor]], seed: int
) -> dict[str, Bound]:
    """Bounds of the gradients of a, b and the differentiable operands.

    A backward reads the accumulator as the forward stored it, in a's dtype; so eps is of that
    dtype. And where a derivative jumps, that decides on which side an element lies: what the
    derivative is there is right as well.

    Args:
        upstream: gradients of outputs by name, for neighbour 0 (the case itself), 1, ...
    """
    names = wanted(task)
    g = generator(seed, "neighbours")
    few = min((x.tensors()[name].numel() for name in names), default=0) < _FEW
    bounds: dict[str, Bound] = {}
    squares: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for i in range(_NEIGHBOURS if few else 4):
        near, up = (_neighbour(x, g) if i else x), upstream(i)
        right = _gradients(task, near, up, torch.float64)
        theirs = _gradients(task, near, up, None)
        for name in names:
            squares[name].append((_error(theirs[name], right[name]), norm(finite(right[name]))))
        if not i:
            stored_acc = _gradients(task, x, up, torch.float64, rounded=True)
            for name in names:
                bounds[name] = Bound(
                    [right[name], stored_acc[name]],
                    eps=torch.finfo(x.a.dtype).eps,
                    classes=[right[name]],
                )
    for name, pairs in squares.items():
        # Rounding moves maxima from one column to another, a few a matrix: the most that is seen.
        worst = max(e for e, _ in pairs)
        bounds[name].theirs = worst * _tail(bounds[name].exact[0].numel())
        bounds[name].addends = _rms([s for _, s in pairs])
    return bounds


def wanted(task: Task) -> tuple[str, ...]:
    """Names of the arrays that gradients are asked for."""
    return ("a", "b", *(o.name for o in task.operands if _has_gradient(o)))


def _has_gradient(o: Any) -> bool:
    return bool(o.differentiable) and o.kind not in ("index", "rotary")


def _gradients(
    task: Task,
    x: Inputs,
    upstream: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    rounded: bool = False,
) -> dict[str, Tensor]:
    names = wanted(task)
    own = x.a.dtype

    def leaf(name: str, t: Tensor) -> Tensor:
        t = t.to(dtype) if dtype is not None and t.is_floating_point() else t
        return t.detach().clone().requires_grad_(name in names and t.is_floating_point())

    leaves = x.map(leaf)
    acc = leaves.a @ leaves.b
    if rounded:
        acc = acc + (acc.detach().to(own).to(acc.dtype) - acc.detach()).nan_to_num()
    found = task.reference(acc, **leaves.operands)
    pairs = [
        (found[name], d.to(found[name].dtype))
        for name, d in upstream.items()
        if found[name].requires_grad
    ]
    arrays = [leaves.tensors()[name] for name in names]
    if not pairs:
        return {name: torch.zeros_like(t) for name, t in zip(names, arrays, strict=True)}
    made = torch.autograd.grad(
        [y for y, _ in pairs], arrays, [d for _, d in pairs], allow_unused=True
    )
    return {
        name: torch.zeros_like(t) if d is None else d
        for name, t, d in zip(names, arrays, made, strict=True)
    }


# ------------------------------------------------------------------------------- helpers
def _stored(task: Task, found: Mapping[str, Tensor], own: torch.dtype) -> dict[str, Tensor]:
    """PyTorch's tiles in the dtype that they are stored in; what is reduced stays as it is."""
    tiles = {o.name: NAMED_DTYPES.get(o.dtype, own) for o in task.outputs if o.kind == "tile"}
    return {name: stored(x, tiles.get(name, x.dtype)) for name, x in found.items()}


def _quantized(dtype: torch.dtype, x: Tensor) -> Tensor:
    """The oracle's value, rounded where the output is fp8."""
    return stored(x, dtype) if dtype in FP8 else x


def _error(got: Tensor, exact: Tensor) -> float:
    return norm(finite(got.double() - exact.double()))


def finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, x.new_zeros(()))


def norm(x: Tensor) -> float:
    """Frobenius, in fp64."""
    return float(torch.linalg.vector_norm(x.double())) if x.numel() else 0.0


def _tail(count: int) -> float:
    """How much more than its root mean square the error of ``count`` elements may be by chance:
    two standard deviations of its norm, 1 for many elements."""
    return 1 + 2 / math.sqrt(max(count, 1))


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(v * v for v in values) / len(values)) if values else 0.0
