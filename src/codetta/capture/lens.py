"""Reading a PyTorch graph as one large Plan, cut at what the language cannot say.

The lens goes through the graph once, in order. A tensor that is computed by liftable operators from
liftable tensors has a Form; any other tensor becomes an input of the Plan when it is first used by
one. Views, transposes and casts change the Form alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from codetta.capture import arithmetic, products, views  # noqa: F401  (they fill RULES)
from codetta.capture.forms import (
    Axis,
    Form,
    Matrix,
    Rotated,
    Virtual,
    leading_axes,
    same,
)
from codetta.capture.observe import Call, Observed
from codetta.capture.rules import RULES, VIEWS, Unliftable
from codetta.language import functions as f
from codetta.language.types import Kind
from codetta.plan.plan import PlanBuilder

aten = torch.ops.aten
_KEEPS_DOUBLING = {
    aten.unsqueeze.default, aten._to_copy.default, aten.cos.default, aten.sin.default,
    aten.clone.default, aten.alias.default, aten.squeeze.dim, aten.neg.default,
    aten.slice.Tensor, aten.expand.default, aten.index.Tensor,
}  # fmt: skip
#: As rms_norm adds its epsilon.
_IN_PLACE = {aten.add_.Scalar: aten.add.Scalar}
_SCALED = {aten.mul.Tensor, aten.mul.Scalar, aten.add.Scalar, aten.div.Tensor}


@dataclass
class Leaf:
    """An input of the Plan: a tensor that the graph computes elsewhere."""

    node: fx.Node
    name: str
    kind: str  # 'tile', 'row', 'col', 'scalar', 'weight', 'rope'
    tensors: tuple[fx.Node, ...] = ()
    parameter: bool = False

    @property
    def fixed(self) -> bool:
        """Whether it is the same for all tokens, and known before the first."""
        return self.kind in ("row", "weight") or self.parameter


@dataclass
class Lens:
    """State of one reading.

    Attributes:
        parameters: nodes that depend on parameters and buffers alone.
        known: forms by tensor identity.
        leaves: inputs of the Plan by name.
        reasons: why nodes were left alone.
        multiplied: by product, the dtype in which the graph computes it.
    """

    seen: Observed
    parameters: set[fx.Node]
    builder: PlanBuilder = field(default_factory=lambda: PlanBuilder("graph"))
    known: dict[int, Any] = field(default_factory=dict)
    node_of: dict[int, fx.Node] = field(default_factory=dict)
    leaves: dict[str, Leaf] = field(default_factory=dict)
    reasons: dict[fx.Node, str] = field(default_factory=dict)
    doubled: set[int] = field(default_factory=set)
    multiplied: dict[int, torch.dtype] = field(default_factory=dict)
    viewing: bool = True

    # ---- reading
    def note(self, node: fx.Node, unwritten: bool = False) -> None:
        """Pass a node that is left alone; ``unwritten``: its results are what it computes."""
        for x in _tensors(self.seen.values.get(node)):
            self.node_of.setdefault(id(x), node)
        for call in (self.seen.calls.get(node) or ()) if unwritten else ():
            self._doubling(call)

    def read(self, node: fx.Node) -> bool:
        """Lift a node; False where it is left alone, with the reason kept."""
        calls, value = self.seen.calls.get(node), self.seen.values.get(node)
        for x in _tensors(value):
            self.node_of.setdefault(id(x), node)
        if calls is None or node.op not in ("call_function", "call_method"):
            return False
        for call in calls:
            self._doubling(call)
        if not calls and not isinstance(value, Tensor):
            return self._picked(node)
        before = dict(self.known)
        self.viewing = all(call.op in VIEWS for call in calls)
        try:
            for call in calls:
                self._call(call)
            forms = [self.derived(x) for x in _tensors(value)]
        except Unliftable as reason:
            self.known = before
            self.reasons[node] = str(reason)
            return False
        return bool(forms) and not any(isinstance(x, Virtual) for x in forms)

    def _picked(self, node: fx.Node) -> bool:
        return False

    def _call(self, call: Call) -> None:
        op = call.op
        if op._schema.is_mutable:
            # What other nodes can see written is not read at all; this is a node's own scratch.
            if op not in _IN_PLACE:
                raise Unliftable("it writes into a tensor")
            written = RULES[_IN_PLACE[op]](self, call.result, *call.args, **call.kwargs)
            self.known[id(call.result)] = written
            return
        if op not in RULES:
            raise Unliftable(f"{op} has no counterpart in the language")
        found = RULES[op](self, call.result, *call.args, **call.kwargs)
        results = call.result if isinstance(call.result, tuple | list) else [call.result]
        forms = found if isinstance(found, list) else [found]
        for x, form in zip(results, forms, strict=True):
            if id(x) not in self.known:
                self.known[id(x)] = form

    def _doubling(self, call: Call) -> None:
        """Keep track of tables whose halves are equal, as cos(cat(angles, angles)) are."""
        result = call.result
        if call.op is aten.cat.default:
            tensors = call.args[0]
            dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
            twice = len(tensors) == 2 and tensors[0] is tensors[1]
            if twice and dim % result.ndim == result.ndim - 1:
                self.doubled.add(id(result))
            return
        if not isinstance(result, Tensor) or not call.args or id(call.args[0]) not in self.doubled:
            return
        if call.op in _SCALED:
            other = call.args[1]
            kept = not isinstance(other, Tensor) or other.ndim == 0
        else:
            kept = call.op in _KEEPS_DOUBLING and same(result.shape[-1], call.args[0].shape[-1])
            if call.op is aten.index.Tensor:  # columns must stay in their order
                kept = kept and len(call.args[1]) < call.args[0].ndim
            if call.op is aten.squeeze.dim or call.op is aten.unsqueeze.default:
                kept = kept and not same(result.shape[-1], 1)
        if kept:
            self.doubled.add(id(result))

    def is_doubled(self, x: Tensor) -> bool:
        return id(x) in self.doubled

    # ---- forms of tensors
    def derived(self, x: Tensor) -> Any:
        """The form of a computed tensor. A view of an input stays in the graph."""
        if id(x) in self.known:
            return self.known[id(x)]
        if self.viewing:
            raise Unliftable("a view of a tensor that is computed elsewhere")
        return self.form(x)

    def form(self, x: Tensor) -> Form:
        """The form of any tensor, which becomes an input if need be."""
        found = self.known.get(id(x))
        if found is None:
            found = self.known[id(x)] = self.leaf(x)
        if isinstance(found, Form):
            return found
        raise Unliftable("a part of a rotation, or a weight, in an expression")

    def leaf(self, x: Tensor) -> Form:
        node = self._node(x)
        if not x.dtype.is_floating_point:
            raise Unliftable("an operand that is not floating point")
        name = node.name
        if x.ndim == 0 or same(x.numel(), 1):
            known = node in self.parameters
            self.leaves[name] = Leaf(node, name, "scalar", parameter=known)
            return Form(self.builder.scalar(name), (Axis(""),) * x.ndim)
        if node in self.parameters:
            if [s for s in x.shape if not same(s, 1)] != [x.shape[-1]]:
                raise Unliftable("a parameter of several axes in an expression")
            axes, _ = leading_axes(x.shape, 1)
            self.leaves[name] = Leaf(node, name, "row")
            return Form(self.builder.row(name, int(x.shape[-1])), axes, (), (int(x.shape[-1]),))
        axes, tokens = leading_axes(x.shape, 1)
        if not tokens:
            raise Unliftable("an activation of one token")
        if same(x.shape[-1], 1):
            self.leaves[name] = Leaf(node, name, "col")
            return Form(self.builder.col(name), axes, tokens)
        if not isinstance(x.shape[-1], int):
            raise Unliftable("an operand whose last size is not known")
        self.leaves[name] = Leaf(node, name, "tile")
        value = self.builder.tile(name, "M", int(x.shape[-1]))
        return Form(value, axes, tokens, (int(x.shape[-1]),))

    def _node(self, x: Tensor) -> fx.Node:
        node = self.node_of.get(id(x))
        if node is None:
            raise Unliftable("an intermediate tensor that has no name in the graph")
        if not isinstance(self.seen.values[node], Tensor):
            raise Unliftable("one of several results")
        return node

    def is_parameter_matrix(self, x: Tensor) -> bool:
        if isinstance(self.known.get(id(x)), Matrix):
            return True
        node = self.node_of.get(id(x))
        return node is not None and node in self.parameters and x.ndim == 2

    def matrix(self, x: Tensor) -> Matrix:
        found = self.known.get(id(x))
        if found is None:
            node = self._node(x)
            if node not in self.parameters or x.ndim != 2:
                raise Unliftable("a product of two activations")
            if not all(isinstance(s, int) for s in x.shape):
                raise Unliftable("a weight of unknown size")
            name = node.name
            self.leaves[name] = Leaf(node, name, "weight")
            found = Matrix(self.builder.weight(name, int(x.shape[0]), int(x.shape[1])))
            self.known[id(x)] = found
        if isinstance(found, Matrix):
            return found
        raise Unliftable("a product of two activations")

    def rounded(self, x: Tensor, form: Form) -> Form:
        """x as stored: rounded once to the operands' dtype."""
        node = form.value.node
        if node.op in ("operand", "round_to") or form.value.type.kind is not Kind.TILE:
            return form
        found = form.but(f.round_to(form.value))
        self.known[id(x)] = found
        for key, other in list(self.known.items()):
            if isinstance(other, Form) and other.value.id == form.value.id:
                self.known[key] = other.but(found.value)
        return found

    # ---- rotary embedding
    def rotation(self, found: Rotated) -> Form:
        """q cos + rotate_half(q) sin, for all heads."""
        base = found.base
        heads, size = base.features
        nodes = tuple(_source(self._node(t)) for t in (found.cos, found.sin))
        name = f"rope_{nodes[0].name}_{nodes[1].name}"
        self.leaves[name] = Leaf(nodes[0], name, "rope", nodes)
        value = f.rotate(
            base.value,
            self.builder.rotary(name),
            head_dim=size,
            rotary_dim=found.stop - found.start,
            heads=heads,
            pairs="halves",
        )
        return base.but(value)


def _source(node: fx.Node) -> fx.Node:
    """The node behind unsqueezes, so that all layers share one table."""
    while node.target == "unsqueeze" and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, tuple | list):
        return [t for t in x if isinstance(t, Tensor)]
    return []
