"""Loss and every gradient of a rewritten training step are as exact as PyTorch's own."""

from __future__ import annotations

import capture_models
import pytest
import torch
import twin
from helpers.budget import within_budget

SOME = ("llama", "qwen3", "gemma2", "gpt2", "nano_gpt")


def compare(module, inputs, dtype):
    """Errors against the fp64 twin, inputs untouched, no NaN, and the same bits again."""
    wide, values = twin.promoted(module, inputs)
    exact, eager = twin.run(wide, values), twin.run(module, inputs)
    made, report = twin.rewritten(module, inputs)
    found, again = twin.run(made, inputs), twin.run(made, inputs)
    for x, y, z, more in zip(
        found.outputs, exact.outputs, eager.outputs, again.outputs, strict=True
    ):
        if x.ndim == 0:  # one number, whose error in PyTorch may be nothing by chance
            worse = torch.finfo(dtype).eps / torch.finfo(x.dtype).eps
            within_budget("loss", x, y, z, addends=y.abs() * worse)
        elif x.is_floating_point():
            within_budget("logits", x, y, z)
        assert torch.equal(x, more)
    assert found.gradients.keys() >= exact.gradients.keys()
    largest = max((g.abs().max() for g in exact.gradients.values()), default=torch.tensor(0.0))
    for name, x in found.gradients.items():
        if name not in eager.gradients:  # it reached no result: None in PyTorch
            assert not x.any()
            continue
        assert x.dtype == eager.gradients[name].dtype
        y = exact.gradients[name]
        # A gradient that cancels (of a bias of k: zero) has addends as large as the others'.
        addends = torch.full_like(y, float(largest)) if y.abs().max() < 1e-6 * largest else None
        within_budget(name, x, y, eager.gradients[name], addends)
        assert torch.equal(x, again.gradients[name]), name
    for before, after in zip(twin.concrete(inputs), found.inputs, strict=False):
        if isinstance(before, torch.Tensor):
            assert torch.equal(before, after)
    return len(report.calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", capture_models.names())
def test_loss_and_gradients_are_within_the_budget(name, dtype):
    graphs = twin.captured(name, dtype).graphs
    assert sum(compare(module, inputs, dtype) for module, inputs in graphs)


@pytest.mark.parametrize("name", SOME)
def test_unused_parts_of_the_result_get_no_gradient(name):
    """Only the loss is differentiated, as in training; logits are left."""
    module, inputs = twin.captured(name).graphs[0]
    made, _ = twin.rewritten(module, inputs)
    found = []
    for graph in (module, made):
        given = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        leaves = [
            x.requires_grad_()
            for x, original in zip(given, inputs, strict=True)
            if isinstance(x, torch.Tensor) and original.requires_grad
        ]
        loss = next(o for o in graph(*given) if o.ndim == 0)
        found.append(torch.autograd.grad(loss, leaves, allow_unused=True))
    for x, y in zip(*found, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(y, x, rtol=1e-3, atol=1e-5)
