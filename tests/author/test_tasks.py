"""The library's tasks: each has a solution that holds its budget, and a near miss that does not.

The solutions lie in ``solutions``, one file per task, written like a candidate. A near miss is a
solution with one thing wrong, the mistake that the task invites.
"""

from __future__ import annotations

import importlib
import runpy
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.budget import within_budget
from torch import Tensor

import codetta
from codetta.author.task import Task, Workload, find, names
from codetta.backends.cuda.launch import explain
from codetta.language import Program

SOLUTIONS = Path(__file__).parent / "solutions"
TASKS = names()
KINDS = {"tile": "Tile", "row": "Row", "col": "Col", "scalar": "Scalar", "index": "Index"}

#: task -> (what a solution says, what the near miss says), and what is wrong about it.
NEAR_MISSES = {
    "batch_norm_partials": ("colsum(x) / rows(x)", "colsum(x)"),  # a sum, no mean
    "bias_gelu_mask": ("gelu(acc + bias) * keep", "gelu((acc + bias) * keep)"),  # the mask inside
    "clamped_swiglu": ("maximum(minimum(u, 2.0), -2.0)", "minimum(u, 2.0)"),  # one bound forgotten
    "cosine_similarity": ("rsqrt(theirs + 1e-6)", "rsqrt(ours + 1e-6)"),
    "dequantize_channel": ("(acc - zero * channel_sum)", "acc - zero * channel_sum"),
    "dpo_term": ("maximum(-h, 0.0)", "maximum(h, 0.0)"),  # the sign of the margin
    "expert_mixture": ("weight * (acc + bias)", "weight * acc + bias"),
    "fake_quantize": (', "e4m3")', ', "e5m2")'),
    "gated_residual": ("gate * (acc + bias)", "gate * acc + bias"),
    "geglu_backward": ("cumulative + g * density", "cumulative + density"),
    "head_norm_rotary": ('pairs="halves"', 'pairs="adjacent"'),
    "huber_loss": ("rowmean(loss)", "rowmean(loss) * 2.0"),
    "kerple_scores": ("rowmax(s)", "rowmax(acc)"),
    "kl_distillation": ("logsumexp(t, t - s)", "logsumexp(s, t - s)"),  # the other one's softmax
    "label_smoothing": ("rowmean(z)", "rowmean(acc)"),
    "layernorm_producer": ("rsqrt(variance + 1e-5)", "rsqrt(variance + mean * mean)"),  # RMSNorm's
    "layernorm_swiglu": ("acc - mean * s", "acc + mean * s"),
    "lora_add": ("scale * delta", "scale + delta"),
    "margin_softmax": ("0.2 * onehot(target, acc)", "0.2"),  # the margin everywhere
    "masked_residual": ("where(mask > 0.5, acc, 0.0)", "where(mask > 0.5, 0.0, acc)"),
    "mish": ("maximum(x, 0.0) + ", ""),  # half of softplus
    "post_norm_link": ("rowsum(x * x)", "rowsum(square(x * (1.0 + gamma)))"),  # of the weighted
    "reglu_bias": ("relu(g) * u", "g * relu(u)"),
    "relu_squared_gate": ("square(relu(g))", "square(g)"),
    "row_amax_fp8": ("rowmax(abs(x))", "rowmax(x)"),
    "row_entropy": ("logsumexp(z, z)", "logsumexp(z, acc)"),
    "softcap_bias": ("softcap(acc + bias, 2.0)", "softcap(acc, 2.0) + bias"),
    "swish_beta": ("x * sigmoid(beta * x)", "x * sigmoid(beta + x)"),
    "weight_norm_scale": ("rsqrt(square_norm + 1e-6)", "(1.0 / (square_norm + 1e-6))"),
    "z_loss": ("0.01 * lse * lse", "0.01 * lse"),
}


# ------------------------------------------------------------------------------ the drawing
def draw(task: Task, at: Workload, seed: int) -> tuple[Tensor, Tensor, dict]:
    """a (m, k), b (k, n) and operands as codetta.gemm takes them."""
    g = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, at.dtype)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(shape, generator=g, dtype=torch.float64)

    def values(operand, shape):
        return {
            "normal": lambda: normal(*shape),
            "positive": lambda: normal(*shape).abs() + 0.1,
            "mask": lambda: (uniform(*shape) < 0.5).double(),
            "keep": lambda: (uniform(*shape) < 0.9).double() / 0.9,
            "scale": lambda: 2.0 ** (-4 * uniform(*shape)),
            "gain": lambda: 64 + 192 * uniform(*shape),
            "position": lambda: torch.arange(shape[0]).double(),
            "zeros": lambda: torch.zeros(shape, dtype=torch.float64),
        }[operand.values]()

    operands = {}
    for o in task.operands:
        shapes = {"tile": (at.m, int(at.n * o.width)), "row": (int(at.n * o.width),)}
        shape = shapes.get(o.kind, () if o.kind == "scalar" else (at.m,))
        if o.kind == "index":
            target = torch.randint(0, at.n, shape, generator=g)
            operands[o.name] = torch.where(torch.arange(at.m) % 8 == 3, -100, target)
        elif o.kind == "rotary":
            angles = normal(7, int(task.constants["rotary_dim"]) // 2)
            table = torch.cat((angles.cos(), angles.sin()), 1).float()
            operands[o.name] = (table, torch.randint(0, 7, shape, generator=g))
        else:
            operands[o.name] = values(o, shape).to(getattr(torch, o.dtype) if o.dtype else dtype)
    return normal(at.m, at.k).to(dtype), (normal(at.k, at.n) / at.k**0.5).to(dtype), operands


def wide(x):
    if isinstance(x, tuple):
        return tuple(map(wide, x))
    return x.double() if x.is_floating_point() else x


def compared(task: Task, program: Program, at: Workload, seed: int = 0) -> None:
    """Assert that the program is within its budget of the task, forward and backward."""
    a, b, operands = draw(task, at, seed)
    given = {"a": a, "b": b, **operands}
    exact = Run(task, *_split({k: wide(v) for k, v in given.items()}))
    theirs = Run(task, *_split({k: _clone(v) for k, v in given.items()}))
    ours = Run(task, *_split({k: _clone(v) for k, v in given.items()}), program=program)
    assert list(ours.made) == [o.name for o in task.outputs]
    sums = {} if task.addends is None else task.addends(exact.acc.detach(), **exact.operands)
    for name, value in ours.made.items():
        wanted, size = exact.made[name].detach(), sums.get(name, exact.made[name]).detach().abs()
        if value.dtype is torch.float8_e4m3fn:  # judged in bf16, by the eps of fp8
            value, size = value.bfloat16(), size * 16
        within_budget(name, value.detach(), wanted, theirs.made[name].detach(), size)
    if not task.gradient:
        return
    g = torch.Generator().manual_seed(seed + 1)
    upstream = {k: torch.randn(v.shape, generator=g).to(v.dtype) for k, v in ours.made.items()}
    sums = gradient_terms(task, exact, upstream)
    for name, mine in ours.gradients(upstream).items():
        eager, right = theirs.gradients(upstream)[name], exact.gradients(upstream)[name]
        within_budget(f"gradient of {name}", mine, right, eager, sums.get(name))


class Run:
    """Outputs and gradients of the reference, or of a program, on inputs of its own."""

    def __init__(self, task, a, b, operands, program=None):
        self.a, self.b, self.operands = a, b, operands
        self.leaves = {"a": a, "b": b}
        self.leaves |= {o.name: operands[o.name] for o in task.operands if o.differentiable}
        if task.gradient:
            for leaf in self.leaves.values():
                leaf.requires_grad_()
        if program is None:
            self.acc = a @ b
            self.made = task.reference(self.acc, **operands)
        else:
            self.made = codetta.gemm(a, b, program, tile=(64, 96), **operands)._asdict()

    def gradients(self, upstream, leaves=None):
        leaves = self.leaves if leaves is None else leaves
        outputs = [self.made[k] for k in upstream]
        given = [u.to(self.made[k].dtype) for k, u in upstream.items()]
        found = torch.autograd.grad(outputs, list(leaves.values()), given, retain_graph=True)
        return dict(zip(leaves, found, strict=True))


def gradient_terms(task: Task, exact: Run, upstream: dict) -> dict:
    """Sums of the absolute terms that gradients of a, b, Rows and Scalars add up.

    Those of a Row and of a Scalar are the gradients of as many numbers as there are elements.
    """
    a, b = exact.a.detach(), exact.b.detach()
    slope = exact.gradients(upstream, {"acc": exact.acc})["acc"].abs()
    found = {"a": slope @ b.t().abs(), "b": a.t().abs() @ slope}
    for o in task.operands:
        if o.kind not in ("row", "scalar") or not o.differentiable:
            continue
        shape = (a.shape[0], int(b.shape[1] * o.width))
        each = exact.operands[o.name].detach().expand(shape).clone().requires_grad_()
        made = task.reference(exact.acc.detach(), **(exact.operands | {o.name: each}))
        total = sum((made[k] * u.double()).sum() for k, u in upstream.items())
        terms = torch.autograd.grad(total, each)[0].abs()
        found[o.name] = terms.sum(0) if o.kind == "row" else terms.sum()
    return found


def _split(given: dict) -> tuple[Tensor, Tensor, dict]:
    given = dict(given)
    return given.pop("a"), given.pop("b"), given


def _clone(x):
    return tuple(map(_clone, x)) if isinstance(x, tuple) else x.clone()


@cache
def solution(name: str) -> Program:
    return runpy.run_path(str(SOLUTIONS / f"{name}.py"))[name]


def small(task: Task, dtype: str = "bfloat16") -> Workload:
    return Workload(37, task.granule * max(112 // task.granule, 1), 24, dtype)


# -------------------------------------------------------------------------------- the tests
def test_there_are_thirty_tasks_and_each_has_a_solution_and_a_near_miss():
    assert len(TASKS) == 30
    assert {p.stem for p in SOLUTIONS.glob("*.py")} == set(TASKS) == set(NEAR_MISSES)
    levels = [find(name).level for name in TASKS]
    assert min(levels.count(x) for x in ("easy", "medium", "hard")) >= 8
    assert levels == sorted(levels, key=["easy", "medium", "hard"].index)


@pytest.mark.parametrize("name", TASKS)
def test_the_text_of_a_task_agrees_with_itself(name):
    task = find(name)
    assert task.name == name
    said = task.formula.replace("⊙", " ")
    for x in (*task.operands, *task.outputs):
        assert x.name in said or x.kind == "rotary", f"{x.name} does not occur in the formula"
    for constant in task.constants:
        assert constant in said
    assert set(task.near) <= set(codetta.programs.catalog())
    for at in (*task.correctness, *task.benchmark):
        assert at.n % task.granule == 0


@pytest.mark.parametrize("name", TASKS)
def test_the_solution_has_the_contract_of_its_task(name):
    task, program = find(name), solution(name)
    declared = {o.name: (o.kind.value, o.width) for o in program.operands}
    wanted = {o.name: (KINDS.get(o.kind, "Rotary"), o.width) for o in task.operands}
    assert declared == wanted
    assert program.granule == task.granule
    assert Program.parse(program.text) == program


@pytest.mark.parametrize("name", TASKS)
def test_the_solution_is_one_kernel_or_the_task_says_why_not(name):
    reason = explain(solution(name), "bf16")
    if reason is not None:
        assert "one kernel over its result" in find(name).notes, reason


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", TASKS)
def test_the_solution_is_within_budget(name, dtype):
    task = find(name)
    compared(task, solution(name), small(task, dtype))
    compared(task, solution(name), Workload(1, task.granule, 1, dtype), seed=2)


@pytest.mark.parametrize("name", TASKS)
def test_the_near_miss_is_not(name):
    right, wrong = NEAR_MISSES[name]
    source = (SOLUTIONS / f"{name}.py").read_text(encoding="utf-8")
    assert source.count(right) == 1
    source = source.replace(right, wrong)
    if "square(" in wrong:
        source = source.replace("import codetta.", "").replace(
            "from codetta.language import ", "from codetta.language import square, ", 1
        )
    scope = {}
    exec(compile(source, f"{name} (near miss)", "exec"), scope)
    task = find(name)
    with pytest.raises(AssertionError, match="allowed"):
        compared(task, scope[name], small(task, "float32"))


def test_the_module_of_a_task_can_be_imported_as_compilers_do():
    reference = find("bias_gelu_mask").reference
    assert vars(importlib.import_module(reference.__module__))[reference.__name__] is not None
