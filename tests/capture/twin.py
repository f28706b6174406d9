"""A graph that Dynamo hands over, its rewritten form, and both of them in fp64 throughout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import capture_models
import torch
from torch import Tensor, fx, nn

from codetta.capture.backend import parameters_of
from codetta.capture.rewrite import Rewritten, rewrite

_NARROW = {torch.float32, torch.bfloat16, torch.float16}
_TO_FLOAT = ("float", "half", "bfloat16")


@dataclass
class Captured:
    """Graphs of one call, with the values of their placeholders."""

    graphs: list[tuple[fx.GraphModule, list[Any]]] = field(default_factory=list)

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append((copy.deepcopy(module), list(inputs)))
        return module.forward


def capture(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Captured:
    """What torch.compile hands to a backend for this call."""
    torch._dynamo.reset()
    found = Captured()
    torch.compile(function, backend=found, dynamic=kwargs.pop("dynamic", False))(*args, **kwargs)
    return found


@cache
def captured(name: str, dtype: torch.dtype = torch.float32) -> Captured:
    """Of a training step of one of the models."""
    return capture(capture_models.make(name, dtype), **capture_models.batch(name))


def rewritten(module: fx.GraphModule, inputs: list[Any]) -> tuple[fx.GraphModule, Rewritten]:
    """A rewritten copy."""
    made = copy.deepcopy(module)
    return made, rewrite(made, inputs, parameters_of(made, inputs))


def promoted(module: fx.GraphModule, inputs: list[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """The same mathematics in fp64: every floating-point dtype in the graph, every input."""
    made = copy.deepcopy(module)
    for node in made.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, _wide_dtype)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _wide_dtype)
        if node.op == "call_method" and node.target in _TO_FLOAT:
            node.target = "double"
        node.meta = {k: v for k, v in node.meta.items() if k == "nn_module_stack"}
    made.recompile()
    return made, [_wide(x) for x in concrete(inputs)]


def concrete(inputs: list[Any]) -> list[Any]:
    """Numbers in the place of symbols."""
    return [x.node.hint if isinstance(x, torch.SymInt) else x for x in inputs]


def _wide_dtype(x: Any) -> Any:
    return torch.float64 if isinstance(x, torch.dtype) and x in _NARROW else x


def _wide(x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    wide = x.detach().double()
    if isinstance(x, nn.Parameter):
        return nn.Parameter(wide, x.requires_grad)
    return wide.requires_grad_(x.requires_grad)


@dataclass
class Step:
    """Outputs, gradients of a random projection of them by placeholder, and inputs afterwards."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    inputs: list[Tensor] = field(default_factory=list)


def run(module: fx.GraphModule, inputs: list[Any]) -> Step:
    """One forward and backward on fresh leaves."""
    inputs = concrete(inputs)
    given = [x.detach().clone() if isinstance(x, Tensor) else x for x in inputs]
    leaves: dict[str, Tensor] = {}
    placeholders = [n.name for n in module.graph.nodes if n.op == "placeholder"]
    for name, x, original in zip(placeholders, given, inputs, strict=True):
        if isinstance(x, Tensor) and original.requires_grad:
            leaves[name] = x.requires_grad_()
    # Leaves that need gradients cannot be written into; a model's inputs may be.
    after = [x for x in given if isinstance(x, Tensor)]
    outputs = [o for o in module(*given) if isinstance(o, Tensor)]
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros((), dtype=torch.float64)
    for o in outputs:
        if o.is_floating_point() and o.requires_grad:
            weight = torch.randn(o.shape, generator=generator, dtype=torch.float64)
            total = total + (o.double() * weight).sum()
    if not total.requires_grad:
        return Step(outputs, {}, after)
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    gradients = {n: g for n, g in zip(leaves, found, strict=True) if g is not None}
    return Step([o.detach() for o in outputs], gradients, [x.detach() for x in after])


@dataclass
class Twin:
    """A graph and its rewritten form in fp64."""

    report: Rewritten
    original: Step
    rewritten: Step

    def check(self, tolerance: float = 1e-12) -> None:
        """Equal outputs, and equal gradients of all inputs."""
        for i, (x, y) in enumerate(zip(self.original.outputs, self.rewritten.outputs, strict=True)):
            _equal(f"output {i}", x, y, tolerance)
        for i, (x, y) in enumerate(zip(self.original.inputs, self.rewritten.inputs, strict=True)):
            _equal(f"input {i} afterwards", x, y, tolerance)
        assert self.original.gradients.keys() <= self.rewritten.gradients.keys()
        largest = max((float(g.norm()) for g in self.original.gradients.values()), default=0.0)
        for name, y in self.rewritten.gradients.items():
            x = self.original.gradients.get(name, torch.zeros_like(y))
            _equal(f"gradient of {name}", x, y, tolerance, largest)


def _equal(what: str, x: Tensor, y: Tensor, tolerance: float, scale: float = 0.0) -> None:
    assert x.shape == y.shape, f"{what}: {tuple(x.shape)} became {tuple(y.shape)}"
    assert x.dtype == y.dtype, f"{what}: {x.dtype} became {y.dtype}"
    if not x.is_floating_point():
        assert torch.equal(x, y), what
        return
    # What is zero in exact arithmetic (the gradient of a bias of k) is noise of its addends.
    size = max(float(x.norm()), 1e-3 * scale)
    error = float((x - y).norm())
    assert error <= tolerance * size, f"{what}: error {error:.2e} of {size:.2e}"


def twin(module: fx.GraphModule, inputs: list[Any]) -> Twin:
    """Both in fp64."""
    wide, values = promoted(module, inputs)
    made, report = rewritten(wide, values)
    return Twin(report, run(wide, values), run(made, values))
