"""What a PyTorch graph costs when its operations run one by one.

The graph runs once on fake tensors, forward and backward, under a dispatch mode. Each aten call
that is not a view counts as a kernel that reads its tensors once and writes its results once.
Backward calls are counted for the node whose forward made them: its autograd nodes say when they
run. Attention counts as one kernel each way (flash attention: q, k, v and the mask read, the output
and its log-sum-exp written), whatever a CPU would make of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from codetta.capture.call import RegionCall
from codetta.capture.headcall import HeadCall
from codetta.explanation.facts import ATTENTION, BACKWARD, FORWARD, GEMM, MEMORY, KernelFact

aten = torch.ops.aten
_SDPA = "scaled_dot_product_attention"
_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
#: These read as many elements of their table as they write.
_GATHERS = frozenset({"embedding", "index", "index_select", "gather"})
_FREE = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided",
                   "_unsafe_view", "lift_fresh", "set_", "resize_"})  # fmt: skip
#: Backward of flash attention over its forward: five products in the place of two.
_ATTENTION_BACKWARD = 2.5


@dataclass
class Measured:
    """A graph's kernels by node, and the values they are counted from."""

    kernels: dict[str, list[KernelFact]] = field(default_factory=lambda: defaultdict(list))
    values: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, list[Any]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)


def measure(module: fx.GraphModule, inputs: list[Any]) -> Measured:
    """Count a graph, forward and, where anything needs a gradient, backward."""
    mode = _mode(inputs)
    with mode:
        given = [_fresh(x, mode) for x in inputs]
    counter = _Counter()
    runner = _Runner(module, counter)
    enabled = torch.is_grad_enabled()
    try:
        with mode, counter:
            runner.run(*given, enable_io_processing=False)
            wanted = _losses(module.graph, counter.found.values)
            if wanted:
                counter.phase = BACKWARD
                torch.autograd.backward(wanted, [torch.ones_like(x) for x in wanted])
    finally:
        torch.set_grad_enabled(enabled)
    for node in module.graph.nodes:
        if is_attention(node) and node.name not in counter.found.unknown:
            counter.found.kernels[node.name] = _attention(node, counter.found)
    return counter.found


def counted(run: Callable[[], object]) -> list[KernelFact]:
    """The kernels of a function over tensors without memory, forward only."""
    counter = _Counter()
    with torch.no_grad(), counter:
        run()
    return [k for found in counter.found.kernels.values() for k in found]


def is_attention(node: fx.Node) -> bool:
    """Whether a node is PyTorch's attention."""
    return getattr(node.target, "__name__", str(node.target)) == _SDPA


# ----------------------------------------------------------------------------------- running
class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = Measured()
        self.node, self.phase = "", FORWARD

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        if func.namespace == "aten" and _is_kernel(func):
            self.found.kernels[self.node].append(_fact(func, args, kwargs, result, self.phase))
        return result


class _Runner(fx.Interpreter):
    """Runs a graph with autograd, and ties every autograd node to the graph's node behind it."""

    def __init__(self, module: fx.GraphModule, counter: _Counter) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.counter = counter
        self.tied: dict[int, Any] = {}  # keeps them alive, so that ids stay unique

    def run_node(self, n: fx.Node) -> Any:
        found = self.counter.found
        self.counter.node = n.name
        if isinstance(n.target, torch._ops.HigherOrderOperator):
            found.unknown.add(n.name)
            result: Any = tree_map(_cut, n.meta["example_value"])
        elif isinstance(n.target, RegionCall):
            found.arguments[n.name] = [self.env[a] for a in _arguments(n)]
            result = _StandIn.apply(_results(n), *found.arguments[n.name])
        elif isinstance(n.target, HeadCall):
            found.arguments[n.name] = [self.env[a] for a in _arguments(n)]
            (result,) = _StandIn.apply([n.meta["example_value"]], *found.arguments[n.name])
        else:
            result = super().run_node(n)
            if is_attention(n) and result.ndim == 4:  # flash attention's layout: heads inside
                result = result.transpose(1, 2).contiguous().transpose(1, 2)
        found.values[n.name] = result
        if n.op != "output":
            self._tie(n.name, tree_leaves(result))
        return result

    def _tie(self, name: str, values: Iterable[Any]) -> None:
        stack = [x.grad_fn for x in values if isinstance(x, Tensor)]
        while stack:
            step = stack.pop()
            if step is None or id(step) in self.tied:
                continue
            self.tied[id(step)] = step
            step.register_prehook(self._enter(name))
            stack += [below for below, _ in step.next_functions]

    def _enter(self, name: str) -> Any:
        def enter(gradients: Any) -> None:
            self.counter.node = name

        return enter


def _cut(x: Any) -> Any:
    """A result that nothing leads back from."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


class _StandIn(torch.autograd.Function):
    """A region's results and gradients without content: its kernels are counted elsewhere."""

    @staticmethod
    def forward(ctx: Any, results: list[Tensor], *arguments: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = arguments
        return tuple(torch.empty_like(x) for x in results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        given = (torch.empty_like(x) if x.requires_grad else None for x in ctx.arguments)
        return None, *given


def _arguments(call: fx.Node) -> list[fx.Node]:
    """A region's arguments, all of them nodes."""
    return [a for a in call.args if isinstance(a, fx.Node)]


def _results(call: fx.Node) -> list[Tensor]:
    """What a region's call gives, as the nodes that take it apart know it."""
    taken: list[Any] = [(u.args[1], u.meta["example_value"]) for u in call.users]
    found: dict[int, Tensor] = dict(taken)
    unread = call.all_input_nodes[0].meta["example_value"].new_empty(0)
    return [found.get(i, unread) for i in range(max(found, default=-1) + 1)]


def _mode(inputs: list[Any]) -> FakeTensorMode:
    for x in inputs:
        if isinstance(x, FakeTensor):
            return x.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def _fresh(x: Any, mode: FakeTensorMode) -> Any:
    """A leaf like x, on which a gradient may be left."""
    if not isinstance(x, Tensor):
        return x
    fake = x if isinstance(x, FakeTensor) else mode.from_tensor(x)
    return fake.detach().requires_grad_(x.requires_grad)


def _losses(graph: fx.Graph, values: dict[str, Any]) -> list[Tensor]:
    """What training starts the backward from: scalars, or else outputs that lead to no other."""
    (output,) = (n for n in graph.nodes if n.op == "output")
    sources: set[fx.Node] = set()
    inner = list(output.all_input_nodes)
    while inner:
        for a in inner.pop().all_input_nodes:
            if a not in sources:
                sources.add(a)
                inner.append(a)
    found: list[Tensor] = []
    last: list[Tensor] = []
    for n in output.all_input_nodes:
        x = values.get(n.name)
        if isinstance(x, Tensor) and x.requires_grad and x.grad_fn is not None:
            found.append(x)
            if n not in sources:
                last.append(x)
    return [x for x in found if x.numel() == 1] or last


# ---------------------------------------------------------------------------------- counting
def _is_kernel(func: Any) -> bool:
    if func._overloadpacket.__name__ in _FREE:
        return False
    returns = func._schema.returns
    views = all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return bool(returns) and not views


def _fact(func: Any, args: Any, kwargs: Any, result: Any, phase: str) -> KernelFact:
    name = func._overloadpacket.__name__
    made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    given = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
    read = sum(map(_bytes, given.values()))
    written = sum(map(_bytes, made))
    if name in _GATHERS:
        read = written + sum(_bytes(x) for x in given.values() if not x.dtype.is_floating_point)
    count = flop_registry.get(func._overloadpacket)
    flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
    kind, size = MEMORY, None
    if count is not None and name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"):
        kind = GEMM
        a, b = [x for x in args if isinstance(x, Tensor)][-2:]
        size = (int(a.shape[-2]), int(b.shape[-1]), int(a.shape[-1]))
    elif count is not None:
        kind = ATTENTION if "attention" in name else GEMM
    itemsize = max((x.element_size() for x in made), default=2)
    return KernelFact(name, phase, kind, "operation", read, written, flops, itemsize, size)


def _bytes(x: Tensor) -> int:
    """What lies in memory: an expanded axis is read once."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= 1 if stride == 0 else int(size)
    return count * x.element_size()


def _attention(node: fx.Node, measured: Measured) -> list[KernelFact]:
    named: dict[str, Any] = dict(zip(_SDPA_ARGUMENTS, node.args, strict=False))
    named |= node.kwargs
    q, k, v = (measured.values[named[n].name] for n in ("query", "key", "value"))
    mask = named.get("attn_mask")
    extra = _bytes(measured.values[mask.name]) if isinstance(mask, fx.Node) else 0
    out = measured.values[node.name]
    lse = out.numel() // out.shape[-1] * 4
    (*batch, rows, size), inner = q.shape, k.shape[-2]
    heads = 1
    for b in batch:
        heads *= int(b)
    flops = int(2 * heads * rows * inner * (size + v.shape[-1]))
    causal = bool(named.get("is_causal"))
    flops = flops // 2 if causal else flops
    inputs = _bytes(q) + _bytes(k) + _bytes(v)
    item = q.element_size()
    found = [
        KernelFact("attention", FORWARD, ATTENTION, "attention", inputs + extra,
                   _bytes(out) + lse, flops, item),
    ]  # fmt: skip
    if out.requires_grad:
        found.append(
            KernelFact("attention backward", BACKWARD, ATTENTION, "attention",
                       inputs + extra + 2 * _bytes(out) + lse, inputs,
                       int(flops * _ATTENTION_BACKWARD), item)
        )  # fmt: skip
    return found
