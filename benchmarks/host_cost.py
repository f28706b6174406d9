"""Host time of a warm call, in microseconds: what codetta adds to QuACK's own launch.

    python benchmarks/host_cost.py [--json FILE] [--calls 2000]

On a Hopper GPU the launches are real and small, so that the queue never fills. Without one, kernels
are replaced by functions that do nothing: what remains is the cost of codetta and of PyTorch's
allocations, with CPU tensors. The median over blocks of calls is printed.

The program has four operands (a tile, a row, a column and a scalar), two stores and one reduction
with a finalizer; the plain GEMM has none of them. The layer has SmolLM2-135M's sizes and is what a
compiled model runs between two attentions, forward and backward, without Inductor's calls.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from types import ModuleType
from typing import Any
from unittest import mock

import torch

import codetta
from codetta.language import Col, Row, Scalar, Tile, epilogue, round_to, rowsum, rsqrt
from codetta.ops import IDENTITY, run_gemm

M, N, K = 64, 128, 64
BLOCK = 50


@epilogue
def four_operands(acc, residual: Tile, gain: Row, scale: Col, alpha: Scalar):  # type: ignore[no-untyped-def]
    x = round_to(acc * scale + residual)
    return {"x": x, "y": round_to(x * gain * alpha), "rstd": rsqrt(rowsum(x * x) + 1.0)}


class _Nothing:
    """A Triton function and its compiled kernel, which does nothing."""

    function = packed_metadata = None

    def run(self, *arguments: Any) -> None:
        pass

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self._launch

    def _launch(self, *arguments: Any, **options: Any) -> Any:
        return self


_index_select = torch.Tensor.index_select


def _select(x: torch.Tensor, axis: int, index: torch.Tensor) -> torch.Tensor:
    """Rows of a gradient are not permuted; tables that are made once are."""
    narrow = x.dtype is torch.bfloat16
    return torch.empty_like(x) if narrow else _index_select(x, axis, index)


@contextmanager
def without_gpu() -> Iterator[None]:
    """Run the fused backend on CPU tensors, its kernels replaced by nothing."""
    from codetta import functional, ops
    from codetta.backends import select
    from codetta.backends.cuda import pointwise, triton_kernels
    from codetta.backends.cuda.launch import CUDA
    from codetta.ops import library
    from codetta.plan import executable

    package: Any = sys.modules["codetta.backends.cuda"]
    quack, plans = ModuleType("quack"), ModuleType("plans")
    quack.launch = lambda *arguments: None  # type: ignore[attr-defined]
    plans.kernel = lambda *arguments, **options: "plan"  # type: ignore[attr-defined]
    with (
        mock.patch.dict(
            sys.modules,
            {"codetta.backends.cuda.quack": quack, "codetta.backends.cuda.plans": plans},
        ),
        mock.patch.object(package, "quack", quack, create=True),
        mock.patch.object(package, "plans", plans, create=True),
        mock.patch.object(select, "backend_for", lambda x: CUDA),
        mock.patch.object(library, "backend_for", lambda x: CUDA),
        mock.patch.object(ops, "backend_for", lambda x: CUDA),
        mock.patch.object(functional, "backend_for", lambda x: CUDA),
        mock.patch.object(executable, "backend_for", lambda x: CUDA),
        mock.patch.object(pointwise, "_on_triton", lambda x: True),
        mock.patch.object(triton_kernels, "build", lambda made: _Nothing()),
        mock.patch.object(torch.Tensor, "get_device", lambda x: 0),
        mock.patch.object(torch.Tensor, "index_select", _select),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda i: 0, create=True),
    ):
        yield


def microseconds(call: Callable[[], Any], calls: int) -> float:
    """Median over blocks of calls."""
    cuda = torch.cuda.is_available()
    for _ in range(10):
        call()
    found = []
    for _ in range(max(5, calls // BLOCK)):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(BLOCK):
            call()
        found.append((time.perf_counter() - start) / BLOCK * 1e6)
    return median(found)


def measure(device: str, calls: int) -> dict[str, float]:
    """Microseconds per call, by what was called."""
    from codetta.backends.cuda.launch import CUDA

    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    a, w = torch.randn(M, K, **like), torch.randn(N, K, **like)
    b = w.t()
    residual = torch.randn(M, N, **like)
    gain, scale = torch.randn(N, device=device), torch.rand(M, device=device)
    alpha = torch.ones((), device=device)
    named = {"residual": residual, "gain": gain, "scale": scale, "alpha": alpha}
    flat = [residual, gain[None], scale[:, None], alpha.reshape(1, 1)]
    learning = {
        name: x.clone().requires_grad_() if x is not scale else x for name, x in named.items()
    }
    a_grad, w_grad = a.clone().requires_grad_(), w.clone().requires_grad_()
    b_grad = w_grad.t()

    found: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> None:
        found[name] = microseconds(call, calls)
        print(f"{found[name]:8.1f} us  {name}", flush=True)

    timed("torch.mm", lambda: torch.mm(a, b))
    timed("torch.empty (M, N)", lambda: torch.empty((M, N), dtype=torch.bfloat16, device=device))
    for name, program, operands in (("plain", IDENTITY, []), ("program", four_operands, flat)):
        made = CUDA.gemm(program, a, b, operands, None, False)
        bare = _own_launch(program, a, b, operands)
        timed(f"{name}: QuACK's launch alone", bare)
        timed(f"{name}: backend, raw partials",
              lambda p=program, o=operands: CUDA.gemm(p, a, b, o, None, True))  # fmt: skip
        timed(f"{name}: backend", lambda p=program, o=operands: CUDA.gemm(p, a, b, o, None, False))
        timed(f"{name}: run_gemm", lambda p=program, o=operands: run_gemm(p, a, b, o))
        del made
    with torch.no_grad():
        timed("plain: codetta.gemm", lambda: codetta.gemm(a, b))
        timed("program: codetta.gemm", lambda: codetta.gemm(a, b, four_operands, **named))
    timed("plain: codetta.gemm, with grad", lambda: codetta.gemm(a_grad, b_grad))
    timed("program: codetta.gemm, with grad",
          lambda: codetta.gemm(a_grad, b_grad, four_operands, **learning))  # fmt: skip

    def step() -> None:
        out = codetta.gemm(a_grad, b_grad, four_operands, **learning)
        torch.autograd.grad(
            (out.x, out.y, out.rstd), (a_grad, w_grad), (out.x, out.y, out.rstd.detach())
        )

    timed("program: forward and backward", step)
    for half, executable, values in layer(device):
        timed(f"layer: {half}, {len(executable.steps)} steps",
              lambda e=executable, v=values: e.run(list(v)))  # fmt: skip
    return found


def layer(device: str, tokens: int = 128) -> Iterator[tuple[str, Any, list[Any]]]:
    """The two halves of a layer with their inputs."""
    from codetta.language.types import Kind
    from codetta.nn.block import ADJACENT, MIDDLE, Spec, compiled, segment

    plan = segment(Spec(MIDDLE, 576, 1536, 9, 3, 64, 64), ADJACENT)
    known: dict[str, Any] = {}
    for i in plan.inputs:
        shape = [tokens if i.type.rows == "M" else int(i.type.rows)] if i.type.has_rows else []
        known[i.name] = torch.randn(*shape, int(i.type.cols), device=device).bfloat16()
        if i.type.kind is Kind.ROTARY:
            table = torch.randn(tokens, 64, device=device)
            known[i.name] = table, torch.arange(tokens, device=device)
    wrt = tuple(n for n, x in known.items() if isinstance(x, torch.Tensor))
    outputs = tuple(o.name for o in plan.outputs)
    parts = compiled(plan, wrt, outputs)
    assert parts.backward is not None
    forward, backward = parts.forward.executable, parts.backward.executable
    given = [known[n] for n in forward.names]
    yield "forward", forward, given
    known |= dict(zip(forward.outputs, forward.run(list(given)), strict=True))
    known |= {f"d_{n}": torch.randn_like(known[n]) for n in outputs}
    yield "backward", backward, [known[n] for n in backward.names]


def _own_launch(program: Any, a: Any, b: Any, operands: Any) -> Callable[[], Any]:
    """QuACK's launch of a described call, on arrays made beforehand."""
    from codetta.backends.cuda.assembly import describe

    call = describe(program, a, b, operands)
    arguments, d = call.prepare(operands)
    c = call.feed_c(operands) if call.feed_c is not None else None
    left, right = call.feed_a(a), call.feed_b(b)
    return lambda: call.launch(call.plan, left, right, d, c, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", default="")
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    print(torch.cuda.get_device_name() if gpu else "no GPU: kernels do nothing, CPU tensors")
    if gpu:
        found = measure("cuda", options.calls)
    else:
        torch.set_num_threads(1)
        with without_gpu():
            found = measure("cpu", options.calls)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"gpu": gpu, "torch": torch.__version__, "us": found}, file, indent=1)


if __name__ == "__main__":
    main()
