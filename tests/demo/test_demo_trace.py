from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from codetta.demo.kernels import KernelRow, sums
from codetta.demo.trace import KernelTrace, region


def seen(trace: KernelTrace) -> list[tuple[str, str, int]]:
    return [(row.kind, row.name, row.bytes) for row in trace.kernels]


def test_matrix_products_are_gemms_and_read_views_as_they_are() -> None:
    a, b = torch.zeros(4, 8), torch.zeros(16, 8)
    with KernelTrace() as trace:
        a @ b.t()
        torch.addmm(torch.zeros(16), a, b.t())
        torch.bmm(a[None], b.t()[None])
    product = 4 * (4 * 8 + 8 * 16 + 4 * 16)
    gemms = [row for row in seen(trace) if row[0] == "gemm"]
    assert gemms == [
        ("gemm", "mm", product),
        ("gemm", "addmm", product + 4 * 16),
        ("gemm", "bmm", product),
    ]


def test_views_and_allocations_are_no_kernels() -> None:
    x = torch.zeros(4, 8)
    with KernelTrace() as trace:
        x.view(8, 4).t()[1:].unsqueeze(0).expand(3, 3, 8).detach()
        torch.empty(5)
        torch.empty_like(x)
        torch.ops.aten._unsafe_view(x, [32])
        x.to(torch.float32)
        x.contiguous()
        x.sum().item()
    assert [row.name for row in trace.kernels] == ["sum"]


def test_changing_what_a_tensor_is_a_view_of_moves_nothing() -> None:
    x = torch.zeros(4, 8)
    with KernelTrace() as trace:
        y = x.neg().detach_()
        y.t_().unsqueeze_(0).squeeze_(0).transpose_(0, 1).as_strided_([32], [1]).set_(x)
    assert [row.name for row in trace.kernels] == ["neg"]


def test_what_memory_holds_once_is_counted_once() -> None:
    x, row = torch.zeros(4, 8), torch.zeros(1, 8)
    with KernelTrace() as trace:
        x + row.expand(4, 8)
        x * x
        x[:, :4].neg()
    assert seen(trace) == [
        ("memory", "add", 4 * (32 + 8 + 32)),
        ("memory", "mul", 4 * (32 + 32)),
        ("memory", "neg", 4 * (16 + 16)),
    ]


def test_writing_in_place_reads_only_what_is_read() -> None:
    x, y = torch.zeros(32), torch.zeros(32)
    with KernelTrace() as trace:
        x.add_(y)
        x.copy_(y)
        x.zero_()
        torch.add(x, x, out=y)
    assert seen(trace) == [
        ("memory", "add_", 4 * 96),
        ("memory", "copy_", 4 * 64),
        ("memory", "zero_", 4 * 32),
        ("memory", "add", 4 * 64),
    ]


def test_a_sliced_gradient_is_two_kernels() -> None:
    x = torch.zeros(4, 8, requires_grad=True)
    out, grad = x[:, :2], torch.zeros(4, 2)
    with KernelTrace() as trace:
        torch.autograd.grad(out, x, grad)
    assert seen(trace) == [
        ("memory", "slice_backward: fill", 4 * 32),
        ("memory", "slice_backward: copy", 4 * 16),
    ]


@pytest.fixture
def library() -> Any:
    library = torch.library.Library("codetta", "FRAGMENT")
    library.define("demo_test_pointwise(Tensor a, Tensor[] others, str program) -> Tensor[]")
    library.impl(
        "demo_test_pointwise",
        lambda a, others, program: [a + others[0], (a * 2).sum(1)],
        "CompositeExplicitAutograd",
    )
    yield
    library._destroy()


def test_an_operation_of_codetta_is_one_kernel_whatever_its_reference_does(library: Any) -> None:
    a, b = torch.zeros(4, 8), torch.zeros(4, 8)
    with KernelTrace() as trace:
        torch.ops.codetta.demo_test_pointwise(a, [b], "text")
    assert seen(trace) == [("memory", "demo_test_pointwise", 4 * (32 + 32 + 32 + 4))]


def test_the_backward_belongs_to_the_region_of_its_forward() -> None:
    x, w = torch.ones(4, 8, requires_grad=True), torch.ones(8, 8, requires_grad=True)
    with KernelTrace() as trace:
        with region("embedding"):
            h = x.exp()
        with region("layers"):
            h = h + (h @ w).sin()  # two uses of h: their gradients are summed in this region
        loss = h.sum()
        loss.backward()
    names = {name: [row.name for row in rows] for name, rows in trace.regions().items()}
    assert names == {
        "embedding": ["exp", "mul"],
        "layers": ["mm", "sin", "add", "cos", "mul", "mm", "mm", "add"],
        "other": ["sum", "ones_like"],
    }
    assert len(trace.rows("layers")) == 8
    assert len(trace.rows()) == 12


def test_a_region_inside_a_region_belongs_to_both() -> None:
    x = torch.ones(4, requires_grad=True)
    with KernelTrace() as trace:
        with region("layers"):
            y = x.exp()
            with region("norm"):
                y = y.sin()
        y.sum().backward()
    assert [row.name for row in trace.rows("norm")] == ["sin", "cos", "mul"]
    assert [row.name for row in trace.rows("layers")] == ["exp", "sin", "cos", "mul", "mul"]
    assert trace.rows("norm")[-1].where == "layers/norm"


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        with region("scatter"):
            grad = grad.neg()
        return grad * 2


def test_an_autograd_function_is_followed_and_may_mark_its_own_backward() -> None:
    x = torch.ones(4, requires_grad=True)
    with KernelTrace() as trace:
        with region("layers"):
            y = _Doubled.apply(x)
        y.sum().backward()
    assert [row.name for row in trace.rows("layers")] == ["mul", "mul"]
    assert [row.name for row in trace.rows("scatter")] == ["neg"]


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_is_attention_even_when_it_is_made_of_matrix_products(
    backend: SDPBackend,
) -> None:
    inputs = [torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3)]
    with KernelTrace() as trace, sdpa_kernel(backend):
        out = scaled_dot_product_attention(*inputs, is_causal=True).exp().sum()
        torch.autograd.grad(out, inputs)
    total = sums(trace.kernels)
    assert total["gemm"].kernels == 0
    assert total["attention"].kernels >= 2
    assert [r.name for r in trace.kernels if r.kind == "memory"] == [
        "exp",
        "sum",
        "ones_like",
        "mul",
    ]


def test_modules_are_marked_by_hooks_that_are_gone_afterwards() -> None:
    model = nn.Module()
    model.embed_tokens = nn.Embedding(5, 4)
    model.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
    with KernelTrace(model) as trace:
        h = model.embed_tokens(torch.tensor([1, 2]))
        for layer in model.layers:
            h = layer(h)
        h.sum().backward()
    assert sums(trace.rows("layers"))["gemm"].kernels == 6
    assert trace.rows("embedding")[0].name == "embedding"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_copy_made_to_hand_over_a_gradient_belongs_to_the_owner_of_the_parameter() -> None:
    """The gradient of a sum is one number, expanded; autograd itself lays it out in memory."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(4, 6, bias=False)])
    with KernelTrace(model) as trace:
        model.layers[0].weight.sum().backward()
    assert [row.name for row in trace.rows("layers")] == ["copy_"]


def test_sums_weigh_rows_by_their_count() -> None:
    total = sums([KernelRow("gemm", "mm", 10, count=3), KernelRow("gemm", "mm", 1)])
    assert (total["gemm"].kernels, total["gemm"].bytes) == (4, 31)
    assert total["memory"].kernels == 0
