"""What each node of a PyTorch graph does in terms of aten operators.

A node of the graph that torch.compile hands over may be any PyTorch function or method. Running it
once on fake tensors (shapes and dtypes, no data) under a dispatch mode shows the handful of aten
operators it consists of, autocast's casts included, so that nothing needs to know the functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Call:
    """One aten call: the operator, its arguments and what it returned."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


@dataclass
class Observed:
    """A graph run once on fake tensors.

    Attributes:
        values: result of each node.
        calls: aten calls of each node; None where the node could not be run.
        keep: every tensor seen, so that identities stay unique.
    """

    values: dict[fx.Node, Any] = field(default_factory=dict)
    calls: dict[fx.Node, list[Call] | None] = field(default_factory=dict)
    grad: dict[fx.Node, bool] = field(default_factory=dict)
    keep: list[Any] = field(default_factory=list)


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors in nested tuples and lists."""
    if isinstance(x, Tensor):
        return [x]
    return [t for y in x for t in tensors_in(y)] if isinstance(x, tuple | list) else []


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # questions about a tensor, such as its device
            self.calls.append(Call(func, args, dict(kwargs or {}), result))
        return result


class _Observer(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, inputs: dict[fx.Node, Any]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.inputs, self.found = inputs, Observed()
        self.enabled = torch.is_grad_enabled()

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "placeholder":
            result: Any = self.inputs[n]
            calls: list[Call] | None = []
        elif n.op == "output":
            return None
        elif n.target is torch._C._set_grad_enabled:
            self.enabled = bool(n.args[0])
            result, calls = None, None
        elif isinstance(n.target, torch._ops.HigherOrderOperator):
            result, calls = n.meta["example_value"], None
        else:
            with _Recorder() as recorder:
                result = super().run_node(n)
            calls = recorder.calls
        self.found.values[n], self.found.calls[n] = result, calls
        self.found.grad[n] = self.enabled
        self.found.keep += [result, calls]
        return result


def observe(module: fx.GraphModule, inputs: list[Any]) -> Observed:
    """Run every node on fake tensors. ``inputs`` are the placeholders' values, fake or real."""
    nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
    mode = _fake_mode([n.meta.get("example_value") for n in nodes], inputs)
    given = {}
    for n, x in zip(nodes, inputs, strict=True):
        meta = n.meta.get("example_value")
        if isinstance(x, Tensor) and getattr(x, "fake_mode", None) is not mode:
            x = meta if getattr(meta, "fake_mode", None) is mode else mode.from_tensor(x)
        given[n] = x
    observer = _Observer(module, given)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # a weight's cast from the cache would not be seen
    try:
        with mode, torch.no_grad():  # so that autograd's own calls are not seen
            observer.run(*given.values(), enable_io_processing=False)
    finally:
        torch.set_autocast_cache_enabled(cached)
    return observer.found


def _fake_mode(meta: list[Any], inputs: list[Any]) -> FakeTensorMode:
    """The mode of the graph's own fake tensors, or a fresh one."""
    for x in (*inputs, *meta):
        if isinstance(x, FakeTensor):
            return x.fake_mode
    context = TracingContext.try_get()
    found = context.fake_mode if context is not None else None
    return found or FakeTensorMode(allow_non_fake_inputs=True)
