"""``pack=True``: weights that one GEMM reads side by side become views of one storage.

Projections of one activation are one GEMM (R6), whose weight is packed in each forward or backward.
Laid out so once, it need not be: a Plan sees that its weights lie side by side
(:mod:`codetta.plan.sides`) and reads them where they lie.

    find     from the rewritten graph: which weights, in which order of rows, and why others not
    lay out  allocate the packed matrix, copy, point ``param.data`` of each to its rows

The Parameter objects stay, and with them values, gradients, hooks and optimizers. Rows one after
another keep each weight contiguous; rows in turn (gate and up on a GPU) do not. Strides and offsets
are part of what Dynamo traced, so the graph in which weights are moved is traced once more.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from codetta.backends.select import backend_for
from codetta.backends.watched import PLAIN
from codetta.capture.call import RegionCall
from codetta.capture.checkpoint import checkpointed_in
from codetta.capture.packed import Packed
from codetta.capture.regions import depends
from codetta.errors import PackNeedsModule, PackSharded
from codetta.language.types import Kind
from codetta.nn.block import BACKWARD, compiled
from codetta.plan import Plan
from codetta.plan.sides import PACKS, Side, Sides, have_memory, packed_sides, sides

ROTATED = "its rows are permuted within heads for the rotation, which no view of weights can be"
FOLDED = "whatever packs it also folds a norm's weight in, or casts, so it is written anyway"
FOREIGN = "not all of it reaches the graph as parameters that the model had when it was compiled"
CUT = (
    "the graph was cut at the buckets of DDP, where parameters are not seen; "
    "torch._dynamo.config.optimize_ddp = False does not cut it"
)
TORN = "a weight of it is in another group, too"
#: Vector loads and TMA want addresses that are multiples of this.
_ALIGNMENT = 16


class _Group(NamedTuple):
    """Weights read side by side, with what the graph was given for them."""

    packed: Packed
    weights: tuple[Any, ...]


class Packer:
    """Lays out the weights of one model.

    Args:
        model: a module, or a method of one.

    Raises:
        PackNeedsModule: it is something else.
        PackSharded: its parameters are sharded.
    """

    def __init__(self, model: Any) -> None:
        owner = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
        if not isinstance(owner, nn.Module):
            raise PackNeedsModule(given=getattr(model, "__qualname__", repr(model)))
        self.model = owner
        refuse_sharded_packs(owner)
        # Parameters that come later belong to somebody else: FSDP2's are gathered for one forward.
        self.known = WeakIdKeyDictionary(dict.fromkeys(owner.parameters()))

    def pack(self, module: fx.GraphModule, inputs: list[Any]) -> tuple[list[Packed], bool]:
        """Lay out what a rewritten graph reads side by side; (what was found, whether any moved).

        Raises:
            PackSharded: the model has been sharded since.
        """
        refuse_sharded_packs(self.model)
        found = self.find(module, inputs)
        holders = Holders(self.model)
        moved = [lay_out(g, holders) for g in found if not g.packed.reason]
        return [g.packed for g in found], any(moved)

    def find(
        self, module: fx.GraphModule, inputs: list[Any], fused: bool | None = None
    ) -> list[_Group]:
        """What the regions of a rewritten graph read side by side; nothing is changed.

        ``fused``: as it would be on the fused backend (True) or the reference (False), had nothing
        been laid out yet; None: as it is on the one that runs where the weights lie.
        """
        holders = Holders(self.model)
        calls = region_calls(module, inputs)
        groups = [g for call, given in calls for g in self._groups(call, given, fused, holders)]
        wanted: dict[int, set[Any]] = defaultdict(set)
        for packed, weights in groups:
            for w in weights if not packed.reason else ():
                wanted[id(w)].add(packed.rows)
        torn = {i for i, layouts in wanted.items() if len(layouts) > 1}
        return [
            _Group(replace(packed, reason=packed.reason or TORN), weights)
            if torn & set(map(id, weights))
            else _Group(packed, weights)
            for packed, weights in groups
        ]

    def _groups(
        self, call: RegionCall, arguments: list[Any], fused: bool | None, holders: Holders
    ) -> Iterator[_Group]:
        given = {
            call.shared_names[g.name]: arguments[g.arguments[0]]
            for g in call.given
            if g.kind == "weight"
        }
        own = {theirs: mine for mine, theirs in call.shared_names.items()}
        sample = next((w for w in given.values() if type(w) in PLAIN), None)
        here = sample is not None and backend_for(sample).name == "cuda"
        layout = call.layout(here if fused is None else fused)
        for rows, names, reason in candidates(call.shared_plan(layout)):
            weights = tuple(given.get(n) for n in names)
            reason = reason or self._fault(rows, weights, holders, asked=fused is not None)
            paths = tuple(holders.path(w, own[n]) for n, w in zip(names, weights, strict=True))
            yield _Group(Packed(paths, reason, rows, call.naive.name), weights)

    def _fault(
        self, rows: Sides | None, weights: tuple[Any, ...], holders: Holders, asked: bool
    ) -> str:
        """Why these weights cannot become views of one storage; '' if they can, or are."""
        if any(isinstance(w, FakeTensor) for w in weights):
            return CUT
        if any(type(w) is not nn.Parameter or w not in self.known for w in weights):
            return FOREIGN
        if rows is None or any(w.shape[1:] != (rows.cols,) for w in weights):
            return "it is not made of rows of weights alone"
        if not have_memory():
            return "it is called inside a transform of torch.func"
        if rows.whole(weights) is not None:
            return ""
        if any(len(holders.of[id(w)]) != 1 for w in weights):
            return "a weight of it is tied"
        if len({(w.dtype, w.device) for w in weights}) > 1:
            return "its weights differ in dtype or device"
        if not asked and not all(map(holders.alone, weights)):
            return "a weight of it shares its memory with another tensor"
        sizes = [m.first * rows.cols * weights[0].element_size() for m in rows.members]
        if any(size % _ALIGNMENT for size in sizes):
            return f"a weight of it would not begin at a multiple of {_ALIGNMENT} bytes"
        return ""


class Holders:
    """Where a model holds its parameters, and who shares memory.

    Attributes:
        of: for each parameter, by identity: its paths, and the modules that hold it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.of: dict[int, list[tuple[str, nn.Module]]] = defaultdict(list)
        for path, module in model.named_modules():
            for name, p in module._parameters.items():
                if p is not None:
                    self.of[id(p)].append((f"{path}.{name}".lstrip("."), module))
        tensors = (*model.parameters(), *model.buffers())
        self.memory = Counter(_memory(x) for x in tensors if type(x) in PLAIN)

    def path(self, p: Any, otherwise: str) -> str:
        return self.of[id(p)][0][0] if id(p) in self.of else otherwise

    def alone(self, p: Tensor) -> bool:
        """All of its storage is its own."""
        own = p.is_contiguous() and p.untyped_storage().nbytes() == p.nbytes
        return own and self.memory[_memory(p)] == 1 and not p.is_inference()


def refuse_sharded_packs(model: nn.Module) -> None:
    """Raise if parameters of the model are sharded: they have no storage of their own.

    Raises:
        PackSharded: it names what shards them.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # not imported, not used
    wrappers = (
        {fsdp.FSDPModule: "fully_shard", fsdp.FullyShardedDataParallel: "FSDP"} if fsdp else {}
    )
    for path, module in model.named_modules():
        for wrapper, kind in wrappers.items():
            if isinstance(module, wrapper):
                raise PackSharded(what=f"{path or 'the model'} is under {kind}")
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    if tensor is not None:
        for name, p in model.named_parameters():
            if isinstance(p, tensor.DTensor):
                raise PackSharded(what=f"{name} is a DTensor placed {p.placements}")


# ------------------------------------------------------------------------------------- find
def region_calls(
    module: fx.GraphModule, inputs: list[Any]
) -> Iterator[tuple[RegionCall, list[Any]]]:
    """Regions of a rewritten graph, those of checkpointed functions too, with their arguments.

    An argument that is no input of the graph is None.
    """
    placeholders = (n for n in module.graph.nodes if n.op == "placeholder")
    known: dict[Any, Any] = dict(zip(placeholders, inputs, strict=True))
    for node in module.graph.nodes:
        if isinstance(node.target, RegionCall):
            yield node.target, [known.get(a) for a in node.args]
    for node, body in checkpointed_in(module):
        yield from region_calls(body, [_known(known, a) for a in node.args[1:]])


def _known(known: dict[Any, Any], a: Any) -> Any:
    return known.get(a) if isinstance(a, fx.Node) else a


def candidates(plan: Plan) -> Iterator[tuple[Sides | None, tuple[str, ...], str]]:
    """Weights that a Plan puts side by side: (their rows, their names, why no view can do it)."""
    saved = _saved(plan)
    for i, node in enumerate(plan.nodes):
        users = [plan.nodes[u].op for u in plan.users[i]]
        if node.op not in PACKS or not plan.parameter_only[i] or PACKS & set(users):
            continue
        rows, reason = sides(plan, i), ""
        if rows not in saved:
            reason = ROTATED if set(users) == {"permute_rows"} else FOLDED
        yield rows, tuple(m.name for m in rows.members) if rows else _operands(plan, i), reason


def _saved(plan: Plan) -> set[Sides]:
    """What some kernel of the Plan, forward or backward, packs and does nothing else with."""
    wrt: tuple[str, ...] = ()
    if torch.is_grad_enabled():
        wrt = tuple(i.name for i in plan.inputs if i.type.kind is not Kind.ROTARY)
    parts = compiled(plan, wrt, tuple(o.name for o in plan.outputs), BACKWARD)
    schedules = [s for s in (parts.forward, parts.backward) if s is not None]
    found = {packed_sides(s, k) for s in schedules for k in s.kernels}
    return {s for s in found if s is not None}


def _operands(plan: Plan, i: int) -> tuple[str, ...]:
    nodes = (plan.nodes[j] for j in sorted(depends(list(plan.nodes), i)))
    return tuple(n.attr("name") for n in nodes if n.op == "operand" and n.type.kind is Kind.TILE)


# ---------------------------------------------------------------------------------- lay out
def lay_out(group: _Group, holders: Holders) -> bool:
    """Make the weights of a group views of one storage; False if they are already."""
    rows, weights = group.packed.sides, group.weights
    assert rows is not None
    if rows.whole(weights) is not None:
        return False
    # A tensor made in inference mode could never be trained.
    with torch.inference_mode(False), torch.no_grad():
        whole = weights[0].new_empty(rows.rows, rows.cols)
        parts = [_part(whole, m, w) for m, w in zip(rows.members, weights, strict=True)]
        for w, part in zip(weights, parts, strict=True):
            w.data = part
    for _, module in (holder for w in weights for holder in holders.of[id(w)]):
        if own_memory not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(own_memory)
    return True


def _part(whole: Tensor, side: Side, weight: Tensor) -> Tensor:
    cols = whole.shape[1]
    part = whole.as_strided(weight.shape, (side.step * cols, 1), side.first * cols)
    return part.copy_(weight)


def own_memory(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """A hook of a module with packed weights: its state dict has tensors with memory of their own.

    safetensors refuses tensors that share memory, and ``torch.save`` would store all of it for each
    file. With ``keep_vars=True`` the parameters themselves were asked for, and stay.
    """
    for name in module._parameters:
        x = state_dict.get(prefix + name)
        if type(x) is Tensor and x.untyped_storage().nbytes() > x.nbytes:
            state_dict[prefix + name] = x.clone(memory_format=torch.contiguous_format)


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
