"""What check_cuda.py checks: names, each with a function that returns (error / allowed, note)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from helpers import oracle
from helpers.cases import CASES, inputs

import codetta
from codetta import programs
from codetta.backends.calls import REFERENCE
from codetta.backends.cuda.launch import CUDA, explain
from codetta.language.program import Program
from codetta.language.types import Kind
from codetta.nn import block
from codetta.nn.block import Spec
from codetta.plan import run as run_schedule

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = {
    "aligned": (512, 768, 256),
    "ragged": (301, 440, 200),
    "odd": (77, 203, 51),
    "row": (1, 256, 64),
}
DEVICE = "cuda"
BACKEND = "cuda"
#: An output of fewer numbers than FEW is judged over DRAWS draws.
FEW, DRAWS = 32, 16

Item = tuple[str, Callable[[], tuple[float, str]]]


def all_items() -> Iterator[Item]:
    for source in (calling_items, segment_items, pointwise_items, gemm_items):
        yield from source()


# -------------------------------------------------------------------------------------- judging
@dataclass
class Budget:
    """Squared norms of error, eager's error and addends of one output, over one or more draws."""

    error: float = 0.0
    eager: float = 0.0
    size: float = 0.0
    eps: float = 0.0

    def add(self, name: str, out: Tensor, exact: Tensor, eager: Tensor, addends: Tensor) -> None:
        """Count one draw; raises if NaN or infinities differ."""
        out64, exact = out.double().reshape(exact.shape), exact.double()
        for what in (torch.isnan, torch.isposinf, torch.isneginf):
            if not torch.equal(what(out64), what(exact.to(out.dtype).double())):
                raise AssertionError(f"{name}: masks of {what.__name__} differ")
        finite = torch.isfinite(exact) & torch.isfinite(out64)
        theirs = (eager.double().reshape(exact.shape) - exact)[finite].nan_to_num(0, 0, 0)
        self.error += float((out64 - exact)[finite].square().sum())
        self.eager += float(theirs.square().sum())
        self.size += float(addends.reshape(exact.shape).double()[finite].square().sum())
        self.eps = torch.finfo(out.dtype).eps

    @property
    def used(self) -> float:
        """error / allowed."""
        allowed = 2 * self.eager**0.5 + 2 * self.eps * self.size**0.5
        return self.error**0.5 / allowed if allowed > 0 else float(self.error > 0) * float("inf")


def ratio(name: str, out: Tensor, exact: Tensor, eager: Tensor, addends: Tensor) -> float:
    """error / allowed of a single draw."""
    budget = Budget()
    budget.add(name, out, exact, eager, addends)
    return budget.used


def worst(pairs: Iterator[tuple[str, float]]) -> tuple[float, str]:
    value, name = max(((r, n) for n, r in pairs), default=(0.0, ""))
    return value, "" if value <= 1 else f"at {name}"


# ---------------------------------------------------------------------------------- GEMM programs
def on_gpu(x: Any) -> Any:
    return tuple(map(on_gpu, x)) if isinstance(x, tuple) else x.to(DEVICE)


def strided(x: Tensor, i: int) -> Tensor:
    """The same values in another layout: transposed, in a wider matrix, or off a boundary."""
    if x.ndim != 2:
        return x
    if i % 3 == 0:
        return x.t().contiguous().t()
    wide = torch.cat((x, x, x), 1)
    return wide[:, : x.shape[1]] if i % 3 == 1 else wide[:, 1 : 1 + x.shape[1]].copy_(x)


def gemm_check(
    program: Program, shape: tuple[int, int, int], dtype: torch.dtype, layouts: int
) -> tuple[float, str]:
    """The budget used by the worst output.

    An output of a few numbers is judged over several draws together: on one number eager's error
    can be next to nothing by chance, which says nothing about ours.
    """
    budgets: dict[str, Budget] = {}
    draws = 1
    seed = 0
    while seed < draws:
        drawn = gemm_draw(program, shape, dtype, layouts, seed)
        if min(len(x[0].reshape(-1)) for x in drawn.values()) < FEW:
            draws = DRAWS
        for name, values in drawn.items():
            budgets.setdefault(name, Budget()).add(name, *values)
        seed += 1
    value, note = worst((name, b.used) for name, b in budgets.items())
    reason = explain(program)
    return value, note or ("" if reason is None else f"unfused: {reason}")


def gemm_draw(
    program: Program, shape: tuple[int, int, int], dtype: torch.dtype, layouts: int, seed: int
) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(ours, exact, eager's, sum of absolute addends) of each output for one draw of inputs."""
    m, n, k = shape
    units = max(-(-n // program.granule), 3)
    a, b, operands = inputs(program, (m,), units, k, dtype, seed)
    a, b, operands = a.to(DEVICE), b.to(DEVICE), {n: on_gpu(x) for n, x in operands.items()}
    for name, x in operands.items():  # vectors and tables as the library makes them, in fp32
        kind = program.operand(name).kind
        if kind in (Kind.ROW, Kind.COL, Kind.SCALAR):
            operands[name] = x.float()
        elif kind is Kind.ROTARY:
            operands[name] = (x[0].float(), x[1])
    if layouts:
        a, b = strided(a, layouts), strided(b, layouts + 1)
        operands = {
            n: strided(x, layouts + i) if isinstance(x, Tensor) else x
            for i, (n, x) in enumerate(operands.items())
        }
    with codetta.use_backend(BACKEND):
        made = codetta.gemm(a, b, program, **operands)
        again = codetta.gemm(a, b, program, **operands)
    outs = {program.outputs[0].name: made} if isinstance(made, Tensor) else made._asdict()
    twice = {program.outputs[0].name: again} if isinstance(again, Tensor) else again._asdict()
    exact = oracle.run(program, a, b, operands, torch.float64).outputs
    eager = oracle.run(program, a, b, operands, dtype).outputs
    found = {}
    for name, out in outs.items():
        same = torch.equal(out.double().nan_to_num(3), twice[name].double().nan_to_num(3))
        assert same, f"{name}: two calls differ"
        addends = oracle.last_addends(program, name, a, b, operands)
        found[name] = (out, exact[name], eager[name], addends)
    return found


def gemm_items() -> Iterator[Item]:
    """Every program in bf16 on all shapes; fp16 and other strides where they make a difference."""
    ready = {n: e.program for n, e in programs.catalog().items() if e.program.has_acc}
    for i, (name, program) in enumerate(ready.items()):
        for shape_name, shape in SHAPES.items():
            yield (
                f"{name} bf16 {shape_name}",
                partial(gemm_check, program, shape, DTYPES["bf16"], 0),
            )
        yield (
            f"{name} fp16 ragged",
            partial(gemm_check, program, SHAPES["ragged"], DTYPES["fp16"], 0),
        )
        check = partial(gemm_check, program, SHAPES["aligned"], DTYPES["bf16"], 1 + i % 3)
        yield f"{name} bf16 strided{1 + i % 3}", check
    for name, program in CASES.items():
        yield f"case {name}", partial(gemm_check, program, SHAPES["ragged"], DTYPES["bf16"], 0)


# -------------------------------------------------------------------------- without accumulator
def pointwise_check(program: Program, m: int, n: int, dtype: torch.dtype):
    units = max(-(-n // program.granule), 3)
    _, b, named = inputs(program, (m,), units, 4, dtype)
    flat: list[Tensor] = []
    for o in program.operands:
        x = on_gpu(named[o.name])
        if o.kind is Kind.ROTARY:
            flat += [x[0].float(), x[1]]
        elif o.kind in (Kind.TILE, Kind.INDEX):
            flat.append(x if x.ndim == 2 else x[:, None])
        else:
            shape = {Kind.ROW: (1, -1), Kind.COL: (-1, 1), Kind.SCALAR: (1, 1)}[o.kind]
            flat.append(x.float().reshape(shape))
    n = b.shape[1]
    backend = CUDA if BACKEND == "cuda" else REFERENCE
    outs = backend.pointwise(program, flat, m, n, dtype, torch.float32, None, False)
    wide = [x.double() if x.is_floating_point() else x for x in flat]
    exact = REFERENCE.pointwise(program, wide, m, n, torch.float64, torch.float64, None, False)
    eager = REFERENCE.pointwise(program, flat, m, n, dtype, dtype, None, False)
    judged = (
        (o.name, ratio(o.name, out, e, t, e))
        for o, out, e, t in zip(program.outputs, outs, exact, eager, strict=True)
    )
    return worst(judged)


def pointwise_items() -> Iterator[Item]:
    for name, entry in programs.catalog().items():
        if not entry.program.has_acc:
            for m, n in ((301, 440), (512, 2048)):
                check = partial(pointwise_check, entry.program, m, n, torch.bfloat16)
                yield f"{name} {m}x{n}", check


# --------------------------------------------------------------------------------- the decoder
def segment_check(spec: Spec, m: int, dtype: torch.dtype):
    plan = block.segment(spec, block.ADJACENT)
    g = torch.Generator().manual_seed(1)
    given: dict[str, Any] = {}
    for i in plan.inputs:
        t = i.type
        shape = ((m if t.rows == "M" else int(t.rows)),) if t.has_rows else ()
        shape += (int(t.cols),) if t.has_cols else ()
        if t.kind is Kind.ROTARY:
            angle = torch.randn(64, spec.rotary_dim // 2, generator=g)
            table = torch.cat((angle.cos(), angle.sin()), 1).to(DEVICE)
            given[i.name] = (table, torch.randint(0, 64, (m,), generator=g).to(DEVICE))
            continue
        x = torch.randn(shape, generator=g)
        if i.name.startswith("w"):
            x /= shape[1] ** 0.5
        elif i.name.startswith("norm"):
            x = 1 + x / 4
        elif i.name == "is_qk":
            x = (torch.arange(shape[0]) < (spec.heads + spec.kv_heads) * spec.head_dim).float()
        given[i.name] = x.to(DEVICE, dtype)
    outputs = tuple(o.name for o in plan.outputs)
    wrt = tuple(n for n, x in given.items() if isinstance(x, Tensor) and n != "is_qk")
    parts = block.compiled(plan, wrt, outputs)
    seeds: dict[str, Tensor] = {}

    def everything(cast: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        x = {n: cast(v) if isinstance(v, Tensor) else v for n, v in given.items()}
        found = run_schedule(parts.forward, {i.name: x[i.name] for i in parts.forward.plan.inputs})
        for o in outputs:
            if o not in seeds:
                seeds[o] = torch.randn(found[o].shape, generator=g).to(DEVICE, dtype)
        assert parts.backward is not None
        x |= found | {f"d_{o}": cast(seeds[o]) for o in outputs}
        found |= run_schedule(
            parts.backward, {i.name: x[i.name] for i in parts.backward.plan.inputs}
        )
        return {n: v for n, v in found.items() if n in outputs or n.startswith("d_")}

    with codetta.use_backend(BACKEND):
        ours = everything(lambda x: x)
    with codetta.use_backend("reference"):
        theirs = everything(lambda x: x)
        exact = everything(lambda x: x.double())
    judged = ((n, ratio(n, x, exact[n], theirs[n], exact[n])) for n, x in ours.items())
    return worst(judged)


def segment_items() -> Iterator[Item]:
    variants = {
        "": {}, "bias": {"biases": frozenset(("wq", "wk", "wv"))}, "qk_norm": {"qk_norm": True},
    }  # fmt: skip
    for part in (block.ENTRY, block.MIDDLE, block.EXIT):
        for variant, extra in variants.items():
            for dtype_name, dtype in DTYPES.items():
                for m in (256, 301):
                    spec = Spec(part, 512, 1408, 8, 4, 64, 64, **extra)
                    name = f"segment {part} {variant} {dtype_name} M{m}"
                    yield name, partial(segment_check, spec, m, dtype)


# ------------------------------------------------------------------------------ ways of calling
def accumulate_check(target: torch.dtype):
    a, b, _ = (x for x in inputs(CASES["identity"], (300,), 440, 200, torch.bfloat16))
    a, b = a.to(DEVICE), b.to(DEVICE)
    start = torch.randn(300, 440, device=DEVICE).to(target)
    out = start.clone()
    with codetta.use_backend(BACKEND):
        codetta.ops.run_gemm_accumulate_(out, a, b)
    exact = start.double() + a.double() @ b.double()
    eager = start + (a @ b).to(target)
    return ratio(
        "target", out, exact, eager, start.double().abs() + a.double().abs() @ b.double().abs()
    ), ""


#: Ways through the loss head, and sums of its weight's gradient in 20, 24 and 32 bits.
HEADS: dict[str, dict[str, Any]] = {
    "forward, 20 bits": {"schedule": "forward", "chunk": 32, "memory_limit": 1},
    "forward, 24 bits": {"schedule": "forward", "chunk": 8, "memory_limit": 1},
    "forward, 32 bits": {"schedule": "forward", "chunk": 32, "accum_dtype": torch.float32},
    "forward, stored logits": {"schedule": "forward", "chunk": 32, "label_smoothing": 0.1},
    "recompute": {"schedule": "recompute"},
}


def head_check(name: str):
    """Loss, dx and dW of a small head. The logit that row 0 has beside the columns whose largest
    one is its shift is so large that the row is computed again."""
    options = HEADS[name]
    torch.manual_seed(0)
    x, weight = torch.randn(77, 72) / 8, torch.randn(203, 72) / 8
    x[0] = 64 * weight[1]
    target = torch.randint(2, 203, (77,))
    target[5] = -100
    smoothing = options.get("label_smoothing", 0.0)

    def values(dtype: torch.dtype, ours: bool) -> list[Tensor]:
        leaves = [t.bfloat16().to(DEVICE, dtype).requires_grad_() for t in (x, weight)]
        aim = target.to(DEVICE)
        if ours:
            with codetta.use_backend(BACKEND):
                loss = codetta.linear_cross_entropy(*leaves, aim, **options)
        else:
            z = leaves[0] @ leaves[1].t()
            loss = torch.nn.functional.cross_entropy(z, aim, label_smoothing=smoothing)
        return [t.double() for t in (loss.detach(), *torch.autograd.grad(loss, leaves))]

    exact, eager = values(torch.float64, False), values(torch.bfloat16, False)
    used = [
        float((a - e).norm() / (2 * (b - e).norm() + 2e-3 * e.norm()))
        for a, b, e in zip(values(torch.bfloat16, True), eager, exact, strict=True)
    ]
    return max(used), ""


def graph_check():
    """A captured call computes what an eager one does, on new values in the same memory."""
    program = programs.residual_rms(eps=1e-6)
    a, b, operands = inputs(program, (301,), 440, 200, torch.bfloat16)
    a, b, residual = a.to(DEVICE), b.to(DEVICE), operands["residual"].to(DEVICE)
    with codetta.use_backend(BACKEND):
        codetta.gemm(a, b, program, residual=residual)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = codetta.gemm(a, b, program, residual=residual)
        a.copy_(torch.randn_like(a))
        graph.replay()
        eager = codetta.gemm(a, b, program, residual=residual)
    assert all(map(torch.equal, captured, eager)), "a replay differs from an eager call"
    return 0.0, ""


def sizes_check():
    """New M, N and K run on the kernel that is there."""
    from codetta.backends.cuda import plans

    program, counts = programs.residual, []
    with codetta.use_backend(BACKEND):
        for m, n, k in ((256, 512, 128), (300, 640, 256), (1, 64, 64)):
            a, b, operands = inputs(program, (m,), n, k, torch.bfloat16)
            codetta.gemm(
                a.to(DEVICE), b.to(DEVICE), program, residual=operands["residual"].to(DEVICE)
            )
            counts.append(len(plans._KERNELS))
    assert len(set(counts)) == 1, "a new size compiled a kernel"
    return 0.0, ""


def calling_items() -> Iterator[Item]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield f"accumulate into {dtype}", partial(accumulate_check, dtype)
    yield "cuda graph", graph_check
    yield "new sizes", sizes_check
