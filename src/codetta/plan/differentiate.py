"""Differentiation of Plans, and the split of a joint Plan into forward and backward.

``differentiate`` is reverse mode with the same DERIVATIVE entries as Programs (plus those of the
contractions), so the derivative of a Plan is a Plan, printable and open to the algebra. Rules run
on the joint Plan, where the forward's values are in sight; ``split`` decides what is saved later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codetta.language import functions as f
from codetta.language.derivatives import broadcast_like
from codetta.language.primitives import DERIVATIVE, REDUCTIONS
from codetta.language.types import Kind
from codetta.language.values import Value, attrs_of
from codetta.language.vjp import sum_to
from codetta.plan.operations import OPERATIONS
from codetta.plan.plan import ACTIVATION, Plan
from codetta.plan.rebuild import Rebuild

_STRUCTURAL = REDUCTIONS | {"unpack", "pack", "rotate", "group_sum", "ungroup", "onehot"}
#: Operations that only scale, shift, round or turn what a contraction made.
_LINEAR = frozenset({"mul", "add", "sub", "neg", "round_to", "rotate", "broadcast"})


def differentiate(plan: Plan, wrt: Sequence[str], cotangents: Sequence[str] | None = None) -> Plan:
    """The joint Plan: the outputs of ``plan``, and ``d_<input>`` for each name in ``wrt``.

    Args:
        plan: the forward.
        wrt: names of inputs. An input no output depends on gets no gradient output.
        cotangents: names of the outputs that have one; each becomes an input ``d_<output>``.
    """
    rebuild = Rebuild(plan, name=f"{plan.name}_joint")
    b = rebuild.builder
    active = set(cotangents if cotangents is not None else (o.name for o in plan.outputs))
    wanted = _depends_on(plan, set(wrt))
    cotangent: dict[int, Value] = {}
    for out in plan.outputs:
        b.output(out.name, rebuild.get(out.node), scores_only=out.scores_only)
        if out.name in active and wanted[out.node]:
            wide = plan.narrow if plan.storage(out.node) == "accumulator" else ""
            seed = b.input(f"d_{out.name}", plan.nodes[out.node].type, ACTIVATION, wide)
            cotangent[out.node] = cotangent[out.node] + seed if out.node in cotangent else seed
    found: dict[str, Value] = {}
    for i in reversed(range(len(plan.nodes))):
        if i not in cotangent or not wanted[i]:
            continue
        node, d, y = plan.nodes[i], cotangent[i], rebuild.get(i)
        if node.op == "operand":
            found[node.attr("name")] = broadcast_like(d, y)
            continue
        args = [rebuild.get(a) for a in node.args]
        if node.op == "round_to" and node.attr("dtype") == "accumulator":
            d = f.round_to(d, "accumulator")  # what is kept in fp32 has such a gradient
        rule = OPERATIONS[node.op].derivative if node.op in OPERATIONS else DERIVATIVE[node.op]
        for a, x, g in zip(node.args, args, rule(d, y, attrs_of(node), *args), strict=True):
            if g is None or not wanted[a]:
                continue
            if node.op not in _STRUCTURAL and node.op not in OPERATIONS:
                thinner = x.type.has_rows < y.type.has_rows or x.type.has_cols < y.type.has_cols
                g = sum_to(broadcast_like(g, y) if thinner else g, x)
            elif node.op in OPERATIONS:
                g = broadcast_like(g, x)
            cotangent[a] = cotangent[a] + g if a in cotangent else g
    for name in wrt:
        if name in found:
            wide = plan.input(name).narrow
            b.output(f"d_{name}", kept_wide(found[name]) if wide else found[name])
    return b.build()


def kept_wide(x: Value) -> Value:
    """x, stored in the accumulator's dtype; of a view, what it shows."""
    if x.node.op in OPERATIONS and OPERATIONS[x.node.op].view and x.type.kind is Kind.TILE:
        (source,) = (Value(x.tracer, a) for a in x.node.args)
        return x.tracer.emit(x.node.op, kept_wide(source), **attrs_of(x.node))
    return f.round_to(x, "accumulator") if x.type.kind is Kind.TILE else x


def _depends_on(plan: Plan, names: set[str]) -> list[bool]:
    wanted: list[bool] = []
    for node in plan.nodes:
        leaf = node.op == "operand" and node.attr("name") in names
        wanted.append(leaf or any(wanted[a] for a in node.args))
    return wanted


@dataclass(frozen=True)
class Split:
    """A joint Plan taken apart.

    Attributes:
        forward: the outputs, then one output ``saved_<n>`` per value saved for the backward.
        backward: gradients from cotangents, saved values, inputs and outputs of the forward.
        saved: names of the forward's outputs the backward reads.
        private: those of them that the forward returns for the backward alone.
    """

    forward: Plan
    backward: Plan
    saved: tuple[str, ...]
    private: tuple[str, ...] = ()


def split(joint: Plan, recompute: bool = True) -> Split:
    """Split a joint Plan into forward and backward with a small saved set.

    Saved are: what the forward stores anyway (outputs, and matrices that feed a contraction), the
    last linear value after a contraction (scaled, shifted and rotated: it equals the accumulator in
    information), and vectors over tokens. Everything pointwise is computed again in the backward,
    inside the kernel that needs it; weights prepared from parameters are prepared again. With
    ``recompute=False`` saved is, too, whatever else a contraction of the forward reads from memory
    (SwiGLU's output): nothing of it is computed, or stored, again.
    """
    backward_nodes = _after_cotangents(joint)
    forward_outputs = [o for o in joint.outputs if not backward_nodes[o.node]]
    gradients = [o for o in joint.outputs if backward_nodes[o.node]]
    stored = _stored(joint, backward_nodes, {o.node for o in forward_outputs}, recompute)
    named = {o.node: o.name for o in forward_outputs}

    forward = Rebuild(joint, name=joint.name.removesuffix("_joint"))
    backward = Rebuild(joint, name=joint.name.replace("_joint", "_backward"))
    read: dict[int, str] = {}

    def leaf(i: int) -> Value | None:
        """The backward's input for a stored forward value."""
        if backward_nodes[i] or i not in stored or joint.parameter_only[i]:
            return None
        if joint.nodes[i].op == "operand":
            return None  # an input of both
        read[i] = named.get(i, f"saved_{i}")
        tile = joint.nodes[i].type.kind is Kind.TILE
        wide = joint.narrow if tile and joint.storage(i) == "accumulator" else ""
        return backward.builder.input(read[i], joint.nodes[i].type, narrow=wide)

    backward.leaf = leaf
    for out in gradients:
        backward.builder.output(out.name, backward.get(out.node))
    plan = backward.builder.build()
    used = {i.name for i in plan.inputs}
    saved = {i: name for i, name in sorted(read.items()) if name in used}
    for out in forward_outputs:
        forward.builder.output(out.name, forward.get(out.node), scores_only=out.scores_only)
    for i, name in saved.items():
        if i not in named:
            forward.builder.output(name, forward.get(i))
    private = tuple(name for i, name in saved.items() if i not in named)
    return Split(forward.builder.build(), plan, tuple(saved.values()), private)


def _after_cotangents(joint: Plan) -> list[bool]:
    """Nodes that depend on an incoming gradient."""
    found: list[bool] = []
    for node in joint.nodes:
        leaf = node.op == "operand" and node.attr("name").startswith("d_")
        found.append(leaf or any(found[a] for a in node.args))
    return found


def _stored(joint: Plan, backward: list[bool], outputs: set[int], recompute: bool) -> set[int]:
    """Forward values that are, or may as well be, in memory after the forward."""
    stored = set(outputs)
    tail: dict[int, int] = {}
    primal = _ancestors(joint, outputs)  # what a rule added, such as r^3, is none
    for i, node in enumerate(joint.nodes):
        if i not in primal:
            continue
        if node.type.kind in (Kind.COL, Kind.SCALAR) and node.args:
            stored.add(i)
        if node.type.kind is not Kind.TILE or joint.parameter_only[i]:
            continue
        if node.op in ("mm", "opaque"):
            tail[i] = i
        elif node.op in _LINEAR:
            tiles = [a for a in node.args if joint.nodes[a].type.kind is Kind.TILE]
            alone = (a for a in tiles if a in tail and len(_forward_users(joint, a, backward)) == 1)
            root = next(alone, None)
            if root is not None:
                tail[i] = tail.pop(root)
    stored |= set(tail)
    for i, node in enumerate(joint.nodes):
        if node.op == "mm" and i in primal:
            kept = ("operand", "round_to")
            for a in node.args:
                weight = joint.parameter_only[a]
                if a in tail or joint.nodes[a].op in kept or not (recompute or weight):
                    stored.add(a)
    return stored


def _ancestors(joint: Plan, roots: set[int]) -> set[int]:
    found, stack = set(roots), list(roots)
    while stack:
        for a in joint.nodes[stack.pop()].args:
            if a not in found:
                found.add(a)
                stack.append(a)
    return found


def _forward_users(joint: Plan, i: int, backward: list[bool]) -> list[int]:
    return [u for u in joint.users[i] if not backward[u]]
