"""A Plan in autograd: what it keeps, gives away and never touches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from functorch.compile import aot_function, nop
from torch.autograd.graph import saved_tensors_hooks

from codetta import use_backend
from codetta.backends.select import chosen_backend
from codetta.demo.trace import KernelTrace
from codetta.nn.block import ADJACENT, MIDDLE, Spec, compiled, segment
from codetta.nn.function import apply_plan
from codetta.plan.prepare import prepared

sys.path.append(str(Path(__file__).resolve().parents[1] / "plan"))
from plan_backends import Watching

SPEC = Spec(MIDDLE, 16, 48, 2, 1, 8, 8)
PLAN = segment(SPEC, ADJACENT)
TOKENS = 200
Z = (TOKENS, 2 * SPEC.mlp)  # gate and up before the activation: dz may take their place


def inputs(spec=SPEC, tokens=TOKENS, device="cpu"):
    g = torch.Generator("cpu").manual_seed(0)
    found = {}
    for i in segment(spec, ADJACENT).inputs:
        if i.name == "rope":
            angles = torch.randn(tokens, spec.rotary_dim // 2, generator=g, device="cpu")
            table = torch.cat((angles.cos(), angles.sin()), 1).to(device)
            found["rope"] = table, torch.arange(tokens, device=device)
            continue
        tile = i.type.kind.value == "Tile"
        rows = [tokens if i.type.rows == "M" else int(i.type.rows)] if tile else []
        x = torch.randn(*rows, int(i.type.cols), generator=g, device="cpu")
        x *= 0.3 if rows else 1.0
        found[i.name] = x.to(device, torch.bfloat16).requires_grad_()
    return found


def leaves(given):
    return [x for n, x in given.items() if n != "rope"]


def cotangents(out):
    g = torch.Generator("cpu").manual_seed(1)
    made = [torch.randn(x.shape, generator=g, device="cpu") for x in out.values()]
    return [d.to(x.device, x.dtype) for d, x in zip(made, out.values(), strict=True)]


def backward(out, given, **options):
    return torch.autograd.grad(list(out.values()), leaves(given), cotangents(out), **options)


@pytest.fixture
def watching(monkeypatch):
    backend = Watching()
    monkeypatch.setattr("codetta.plan.executable.backend_for", lambda x: backend)
    return backend


def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def reference():
    given = inputs()
    return backward(apply_plan(PLAN, given), given)


def test_donation_changes_no_bit(watching):
    watching.accepts = False
    expected = reference()
    watching.accepts = True
    given = inputs()
    before = [x.detach().clone() for x in leaves(given)]
    out = apply_plan(PLAN, given)
    visible = {n: x.detach().clone() for n, x in out.items()}
    found = backward(out, given)
    assert Z in watching.taken
    assert equal(found, expected)
    assert equal(leaves(given), before)
    assert all(torch.equal(out[n], x) for n, x in visible.items())


def test_a_kept_graph_donates_nothing_and_gives_equal_gradients(watching):
    given = inputs()
    out = apply_plan(PLAN, given)
    first = backward(out, given, retain_graph=True)
    again = backward(out, given, retain_graph=True)
    assert Z not in watching.taken
    last = backward(out, given)  # the graph may go now
    assert Z in watching.taken
    assert equal(first, again) and equal(first, last)
    with pytest.raises(RuntimeError, match="second time"):
        backward(out, given)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_donates_nothing(watching):
    given = inputs()
    out = apply_plan(PLAN, given)
    found = backward(out, given, create_graph=True)
    assert Z not in watching.taken
    assert all(g.requires_grad for g in found)
    assert equal([g.detach() for g in found], reference())


def test_what_a_hook_on_saved_tensors_kept_is_not_written(watching):
    kept = []
    given = inputs()
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = apply_plan(PLAN, given)
    before = [x.detach().clone() for x in kept]
    found = backward(out, given)
    assert Z not in watching.taken
    assert equal([x.detach() for x in kept], before)
    assert equal(found, reference())


def test_a_hook_that_moves_saved_tensors_gives_the_same_gradients():
    given = inputs()
    with saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        out = apply_plan(PLAN, given)
    assert equal(backward(out, given), reference())


def test_the_step_needs_no_more_memory_than_its_schedules_say(watching):
    """Forward and backward through autograd: saved tensors are freed while the backward runs."""
    watching.accepts = False
    given = inputs()
    out = apply_plan(PLAN, given)
    held = watching.live
    backward(out, given)
    kept = watching.peak
    watching.accepts = True
    del out
    assert watching.live == 0
    watching.peak = 0
    out = apply_plan(PLAN, given)
    assert watching.live == held
    backward(out, given)
    z = 2 * Z[0] * Z[1]
    assert watching.peak <= kept - 0.9 * z


def test_saved_tensors_are_freed_before_the_backward_ends(watching, monkeypatch):
    """When the last kernel runs, only what it needs, outputs and gradients are alive."""
    parts = compiled(PLAN, tuple(n for n in inputs() if n != "rope"), ("x_out", "qkv"))
    given = inputs()
    out = apply_plan(PLAN, given)
    saved = watching.live - sum(x.nbytes for x in out.values())
    seen = []
    original = Watching.gemm

    def gemm(self, *arguments, **options):
        made = original(self, *arguments, **options)
        seen.append(self.live)
        return made

    monkeypatch.setattr(Watching, "gemm", gemm)
    found = backward(out, given)
    assert parts.backward is not None and len(seen) == 8
    gradients = sum(g.untyped_storage().nbytes() for g in found)
    visible = sum(x.nbytes for x in out.values()) + gradients
    assert saved > 0 and seen[-1] <= visible + 0.25 * saved


def test_an_output_that_reaches_no_loss_has_gradient_zero():
    given = inputs()
    out = apply_plan(PLAN, given)
    (d,) = cotangents({"qkv": out["qkv"]})
    found = torch.autograd.grad(out["qkv"], leaves(given), d)
    other = apply_plan(PLAN, given)
    zero = torch.zeros_like(other["x_out"])
    expected = torch.autograd.grad((other["x_out"], other["qkv"]), leaves(given), (zero, d))
    assert equal(found, expected)


def test_the_backward_runs_on_the_backend_of_the_forward(monkeypatch):
    given = inputs()
    with use_backend("reference"):
        out = apply_plan(PLAN, given)
    assert chosen_backend() == "auto"
    seen = []
    monkeypatch.setattr(
        "codetta.plan.executable.backend_for",
        lambda x: seen.append(chosen_backend()) or Watching(),
    )
    backward(out, given)
    assert seen == ["reference"]


def test_frozen_inputs_get_no_gradient():
    given = inputs()
    given["wg"].requires_grad_(False)
    out = apply_plan(PLAN, given)
    rest = [x for x in leaves(given) if x.requires_grad]
    found = torch.autograd.grad(list(out.values()), rest, cotangents(out))
    names = [n for n in given if n not in ("rope", "wg")]
    full = dict(zip([n for n in given if n != "rope"], reference(), strict=True))
    assert equal(found, [full[n] for n in names])


@pytest.mark.parametrize("tokens", [512, 500, 77])
def test_the_fused_backend_writes_dz_over_z(fused, tokens):
    """In place or not, the bits are the same; on a GPU, one matrix (M, 2 F) less is alive."""
    spec = Spec(MIDDLE, 256, 768, 2, 1, 128, 128)
    device = "cuda" if fused == "cuda" else "cpu"
    given = inputs(spec, tokens, device)
    out = apply_plan(segment(spec, ADJACENT), given)
    backward(out, given, retain_graph=True)  # compile
    peaks, found = [], []
    for keep in (True, False):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            peaks.append(-torch.cuda.memory_allocated())
        found.append(backward(out, given, retain_graph=keep))
        if device == "cuda":
            peaks[-1] += torch.cuda.max_memory_allocated()
    assert equal(*found)
    if peaks:
        assert peaks[1] <= peaks[0] - 0.7 * tokens * 2 * spec.mlp * 2


# ------------------------------------------------------------------- gradients in their own rows
class Preparing:
    """The fused backend, as far as a gradient's rows go."""

    name = "cuda"

    def __init__(self):
        self.seen = []

    def prepare(self, plan, weights):
        self.seen.append(tuple(weights[0].shape))
        return prepared(plan, weights)


@pytest.fixture
def preparing(monkeypatch):
    backend = Preparing()
    monkeypatch.setattr("codetta.nn.function.backend_for", lambda x: backend)
    return backend


def test_gradients_of_gate_and_up_get_rows_of_their_own_on_a_gpu(preparing, monkeypatch):
    """Rows of the merged gradient alternate, and autograd would copy what lies like that."""
    given = inputs()
    found = backward(apply_plan(PLAN, given), given)
    assert preparing.seen == [(SPEC.mlp, SPEC.hidden)] * 2
    monkeypatch.undo()
    again = backward(apply_plan(PLAN, given), given)
    names = [n for n in given if n != "rope"]
    strided = {n for n, g in zip(names, again, strict=True) if not g.is_contiguous()}
    assert strided == {"wg", "wu"}
    for name, g, h in zip(names, found, again, strict=True):
        assert torch.equal(g, h), name
        assert name in ("o", "x") or g.is_contiguous(), name


def test_they_are_copied_by_pytorch_where_somebody_watches(preparing):
    given = inputs()
    out = apply_plan(PLAN, given)
    with KernelTrace() as trace:
        found = backward(out, given)
    assert preparing.seen == []
    assert all(g.is_contiguous() for g in found)
    assert sum(k.name == "clone" for k in trace.kernels) == 2


def test_a_compiler_sees_the_copy(preparing):
    given = inputs()
    names = [n for n in given if n != "rope"]

    def step(*tensors):
        rope = {"rope": tensors[len(names) :]}
        return tuple(apply_plan(PLAN, dict(zip(names, tensors, strict=False)) | rope).values())

    tensors = [given[n] for n in names]
    out = aot_function(step, nop)(*tensors, *given["rope"])
    found = torch.autograd.grad(out, tensors, cotangents(dict(enumerate(out))))
    assert preparing.seen == [] and all(g.is_contiguous() for g in found)
