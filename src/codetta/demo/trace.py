"""Which kernels one forward + backward launches, seen by watching PyTorch's dispatcher.

`KernelTrace` is a TorchDispatchMode: below autograd, every aten or codetta operation passes
through it, forward and backward. It keeps those that are kernels (views, allocations and metadata
are not) and notes for each

- its kind: a GEMM, part of attention, or memory-bound (everything else);
- its bytes: each input read once + each output written once, where a dimension of stride 0 (an
  expanded tensor) counts once, since memory holds it once;
- its regions: the marked stretches of the step ("layers", "embedding", ...) that it belongs to.

Regions in the backward. A forward operation that needs a gradient takes a number from autograd's
counter and its backward node keeps it; a region remembers the interval of numbers taken inside it.
In the backward the running node's number says which regions its kernels belong to. This holds for
any nesting, needs no cooperation from the model, and sums of gradients go to the node that brought
the last addend. Module paths on grad nodes would miss functions called outside modules, and
wrapping modules in autograd functions would change what is measured.

Regions are `torch.profiler.record_function` labels that start with "region:", so code that is
measured marks itself without importing this module, and a profiler shows the same stretches.

Attention is recognised where it is called: when `scaled_dot_product_attention` falls apart into
matrix products and a softmax (as it does for some dtypes and devices), these count as attention
all the same.

A compiled model. Hooks and function modes would change what Dynamo captures, so a model that was
compiled has no marked modules: the kernels of its regions are those of the codetta operators and of
running schedules (which move rows with plain PyTorch), under "programs", and everything else is
under "other". The trace is off while PyTorch compiles. A whole
schedule that runs as one operator (`codetta::plan`) is opened and its kernels are seen one by one.
Triton kernels that Inductor generates do not pass the dispatcher: they are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from codetta.demo.kernels import ATTENTION, GEMM, MEMORY, PROGRAMS, KernelRow
from codetta.plan.executable import SCHEDULE
from codetta.plan.operator import run_plan

_PLAN = "codetta::plan"
_REGION = "region:"
_ENTER, _EXIT = "profiler::_record_function_enter_new", "profiler::_record_function_exit"

_GEMMS = frozenset(("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "gemm"))
_ATTENTIONS = ("scaled_dot_product", "_flash_attention", "_efficient_attention")
_ALLOCATIONS = ("empty", "new_empty", "_efficientzerotensor")
#: They change what a tensor is a view of, or its shape, not what is in memory.
_METADATA = frozenset((
    "detach_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "swapaxes_",
    "swapdims_", "rename_",
))  # fmt: skip
_OVERWRITES = frozenset(("copy_", "fill_", "zero_"))  # write their first argument, never read it
# One operation, two kernels: fill the larger output, then copy the input into a part of it.
_FILL_THEN_COPY = frozenset(("slice_backward", "select_backward", "constant_pad_nd"))


def region(name: str) -> torch.profiler.record_function:
    """`with region("layers"): ...` marks what runs inside, and its backward, as part of `name`."""
    return torch.profiler.record_function(_REGION + name)


class KernelTrace(TorchDispatchMode):
    """`with KernelTrace() as trace: loss().backward()` fills `trace.kernels`, in order of launch.

    Given a model, the trace marks the calls of its modules (`*.layers.<i>` as "layers",
    `*.embed_tokens` as "embedding") while it is entered, and what autograd does to hand a parameter
    its gradient belongs to the region of the module that owns it. With `compiled` it calls no
    Python of its own inside the model, and recognises attention by the name of its kernels.

    Not to be entered inside a region that was entered before it.
    """

    def __init__(self, model: nn.Module | None = None, *, compiled: bool = False) -> None:
        super().__init__()
        self._compiled = compiled
        self._modules = [] if compiled else _modules_to_mark(model)
        self._owners = {id(p): name for m, name in self._modules for p in m.parameters()}
        self._hooks = ExitStack()
        self.kernels: list[KernelRow] = []
        self._regions: list[tuple[str, ...]] = []  # of each kernel
        self._open: list[tuple[str | None, int]] = []  # label (None: not ours), first number inside
        self._closed: list[tuple[int, int, str]] = []  # [first, last) numbers taken inside a label
        self._attention = _AttentionRegion()

    def rows(self, name: str | None = None) -> list[KernelRow]:
        """The kernels of region `name`, or all of them."""
        return [
            kernel
            for kernel, regions in zip(self.kernels, self._regions, strict=True)
            if name is None or name in regions
        ]

    def regions(self) -> dict[str, list[KernelRow]]:
        """{outermost region: its kernels}; what no region claims is under "other"."""
        found: dict[str, list[KernelRow]] = {}
        for kernel, regions in zip(self.kernels, self._regions, strict=True):
            found.setdefault(regions[0] if regions else "other", []).append(kernel)
        return found

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Otherwise Dynamo would run a compiled model as it is, uncompiled, under the trace."""
        return True

    def __enter__(self) -> KernelTrace:
        for module, name in self._modules:
            _mark_calls(module, name, self._hooks)
        if not self._compiled:
            self._attention.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, value, trace)
        if not self._compiled:
            self._attention.__exit__(kind, value, trace)
        self._hooks.close()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        label = func._schema.name
        if label == _PLAN:
            return self._opened(*args)
        result = func(*args, **(kwargs or {}))
        if label == _ENTER:
            self._open.append((self._named(args[0]), _next_number()))
        elif label == _EXIT:
            name, first = self._open.pop()
            if name is not None:
                self._closed.append((first, _next_number(), name))
        else:
            self._record(func, args, kwargs or {}, result)
        return result

    def _named(self, mark: str) -> str | None:
        """The region that a record_function label opens."""
        if self._compiled and mark == SCHEDULE:
            return PROGRAMS
        return mark.removeprefix(_REGION) if mark.startswith(_REGION) else None

    def _opened(self, plan: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        super().__enter__()  # a mode is off while it handles an operation
        try:
            return run_plan(plan, inputs)
        finally:
            super().__exit__(None, None, None)

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        moved = _bytes_moved(func, args, kwargs, result)
        if not moved:
            return
        regions = self._current_regions()
        if self._compiled and (PROGRAMS in regions or func.namespace == "codetta"):
            regions = (PROGRAMS,)
        name = func._schema.name.partition("::")[2]
        kind = ATTENTION if "attention" in regions else _kind(name)
        for part, size in moved:
            self.kernels.append(KernelRow(kind, name + part, size, where="/".join(regions)))
            self._regions.append(regions)

    def _current_regions(self) -> tuple[str, ...]:
        """Outermost first. Labels open right now win: a backward may mark stretches of its own."""
        opened = tuple(name for name, _ in self._open if name is not None)
        node = torch._C._current_autograd_node()
        if opened or node is None:
            return opened
        owner = self._owners.get(id(getattr(node, "variable", None)))  # of a parameter's gradient
        if owner is not None:
            return (owner,)
        number = node._sequence_nr()
        # An inner region closes before the one around it.
        return tuple(n for first, last, n in reversed(self._closed) if first <= number < last)


class _AttentionRegion(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            with region("attention"):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _kind(name: str) -> str:
    if name in _GEMMS or name.endswith("_mm"):  # _scaled_mm, _grouped_mm, _int_mm
        return GEMM
    return ATTENTION if any(part in name for part in _ATTENTIONS) else MEMORY


def _bytes_moved(func: Any, args: Any, kwargs: Any, result: Any) -> list[tuple[str, int]]:
    """[(suffix of the name, bytes)], one per kernel launched; empty if `func` is no kernel."""
    name = func._schema.name.partition("::")[2]
    mutates = func._schema.is_mutable
    inputs = _distinct(tree_leaves((args, kwargs)))
    outputs = _distinct(tree_leaves(result))
    if name in _METADATA or name.startswith(_ALLOCATIONS):
        return []
    if mutates:
        written = _distinct(_mutated(func, args, kwargs))
        fresh = [out for out in outputs if not _shares(out, written)]
        unread = written[:1] if name in _OVERWRITES else _mutated(func, args, kwargs, only_out=True)
        read = [x for x in inputs if not any(x is other for other in unread)]
        return [("", _size(read) + _size(written) + _size(fresh))]
    if all(_shares(out, inputs) for out in outputs):  # no output at all, or a view in all but name
        return []
    if name in _FILL_THEN_COPY:
        whole, part = _size(outputs), _size(inputs)
        return [(": fill", whole), (": copy", 2 * part)]
    return [("", _size(inputs) + _size(outputs))]


def _size(tensors: Sequence[torch.Tensor]) -> int:
    return sum(_extent(t) * t.element_size() for t in tensors)


def _extent(tensor: torch.Tensor) -> int:
    """Elements in memory: the product of the sizes whose stride is not 0."""
    if tensor.numel() == 0:
        return 0
    extent = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        extent *= size if stride != 0 else 1
    return extent


def _distinct(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among `leaves`; one handed in twice (as in x * x) is read once."""
    seen: dict[Any, torch.Tensor] = {}
    for x in leaves:
        if isinstance(x, torch.Tensor):
            seen.setdefault((_storage(x), x.storage_offset(), x.shape, x.stride()), x)
    return list(seen.values())


def _mutated(func: Any, args: Any, kwargs: Any, only_out: bool = False) -> list[Any]:
    """The arguments that `func` writes into by its schema (`only_out`: and does not read)."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and (argument.is_out or not only_out):
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found.extend(tree_leaves(given))
    return found


def _shares(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return any(_storage(tensor) == _storage(other) for other in others)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _next_number() -> int:
    """The number that the next backward node of this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


def _modules_to_mark(model: nn.Module | None) -> list[tuple[nn.Module, str]]:
    found = []
    for path, module in model.named_modules() if model is not None else ():
        parent, _, leaf = path.rpartition(".")
        if parent.rpartition(".")[2] == "layers" and leaf.isdigit():
            found.append((module, "layers"))
        elif leaf == "embed_tokens":
            found.append((module, "embedding"))
    return found


def _mark_calls(module: nn.Module, name: str, hooks: ExitStack) -> None:
    opened: list[torch.profiler.record_function] = []

    def before(*_: Any) -> None:
        opened.append(region(name))
        opened[-1].__enter__()

    def after(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    hooks.callback(module.register_forward_pre_hook(before).remove)
    hooks.callback(module.register_forward_hook(after).remove)
