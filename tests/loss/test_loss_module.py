"""The module, and the loss inside compiled functions."""

from __future__ import annotations

import pytest
import torch
from loss_oracle import close, head, reference

import codetta


def test_the_module_is_the_function():
    x, weight, target, bias = head(3, 5)
    weights = torch.rand(3, 5, dtype=torch.float64)
    settings = {"shift": True, "softcap": 3.0, "label_smoothing": 0.1, "ignore_index": 2}
    target = target.clamp_min(0)
    module = codetta.nn.LinearCrossEntropyLoss(**settings, z_loss=0.1, chunk=4)
    call = {"bias": bias, "token_weight": weights, "num_items_in_batch": 9}
    call |= {"row_scale": weights + 1, "column_scale": weight.detach()[0]}
    close(module(x, weight, target, **call),
          reference(x, weight, target, **settings, **call, z_loss=0.1)[0])  # fmt: skip
    assert not list(module.parameters())
    assert repr(module) == (
        "LinearCrossEntropyLoss(ignore_index=2, label_smoothing=0.1, softcap=3.0, z_loss=0.1, "
        "shift=True, chunk=4)"
    )


def test_the_module_refuses_what_the_function_refuses():
    module = codetta.nn.LinearCrossEntropyLoss(reduction="average")
    with pytest.raises(codetta.errors.BadAttribute):
        module(*head(5)[:3])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "none"},
        {"schedule": "forward", "label_smoothing": 0.1, "softcap": 2.0, "shift": True},
        {"return_lse": True, "return_accuracy": True, "return_logits": True},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
def test_a_compiled_function_holds_the_loss_in_one_graph(options):
    x, weight, target, bias = head(3, 5)

    def loss(x, weight, bias):
        return codetta.linear_cross_entropy(x, weight, target, bias=bias, chunk=4, **options)

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    results = []
    for function in (loss, compiled):
        made = function(x, weight, bias)
        parts = made if isinstance(made, tuple) else (made,)
        total = sum(p.sum() for p in parts if p.requires_grad)
        results.append([*parts, *torch.autograd.grad(total, (x, weight, bias))])
    for a, b in zip(*results, strict=True):
        close(a.detach(), b.detach(), 0.0)


#: A sum of dW over four chunks, for which fp32 does not fit.
NARROW = {"schedule": "forward", "chunk": 16, "memory_limit": 1}


def short_and_wide():
    """A bf16 head, and dW by the function with a sum in 24 bits and with one in fp32."""
    x, weight, target, _ = head(64, d=16, v=61, dtype=torch.bfloat16)
    found = []
    for dtype in (None, torch.float32):
        loss = codetta.linear_cross_entropy(x, weight, target, accum_dtype=dtype, **NARROW)
        found.append(torch.autograd.grad(loss, weight)[0])
    assert not torch.equal(*found)
    return (x, weight, target), *found


def test_the_module_sums_dw_as_it_is_told():
    (x, weight, target), *expected = short_and_wide()
    for dtype, dw in zip((None, torch.float32), expected, strict=True):
        module = codetta.nn.LinearCrossEntropyLoss(accum_dtype=dtype, **NARROW)
        assert (f"accum_dtype={dtype}" in repr(module)) == (dtype is not None)
        assert torch.equal(torch.autograd.grad(module(x, weight, target), weight)[0], dw)


def test_a_compiled_function_sums_dw_as_it_is_told():
    """The operator's text carries it to where the schedule is chosen."""
    (x, weight, target), *expected = short_and_wide()

    def loss(x, weight, dtype):
        return codetta.linear_cross_entropy(x, weight, target, accum_dtype=dtype, **NARROW)

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for dtype, dw in zip((None, torch.float32), expected, strict=True):
        assert torch.equal(torch.autograd.grad(compiled(x, weight, dtype), weight)[0], dw)


def test_a_compiled_function_refuses_a_dtype_for_sums():
    x, weight, target, _ = head(5)
    torch._dynamo.reset()
    compiled = torch.compile(codetta.linear_cross_entropy, backend="eager")
    with pytest.raises(codetta.errors.BadAttribute):
        compiled(x, weight, target, accum_dtype=torch.float16)


def test_a_compiled_function_serves_any_number_of_tokens():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()

    def loss(x, weight, target):
        return codetta.linear_cross_entropy(x, weight, target, label_smoothing=0.1)

    compiled = torch.compile(loss, backend=backend, fullgraph=True, dynamic=True)
    for m in (5, 8, 12):
        x, weight, target, _ = head(m)
        close(compiled(x, weight, target), reference(x, weight, target, label_smoothing=0.1)[0])
    assert len(graphs) == 1
    calls = [n.target for n in graphs[0].graph.nodes if "linear_cross_entropy" in str(n.target)]
    assert calls == [torch.ops.codetta.linear_cross_entropy.default]


def test_the_operators_follow_the_rules_of_pytorch():
    """Schemas, fake results, autograd registration."""
    x, weight, target, bias = head(5, ignored=0.0)
    from codetta.loss.options import Logits, Options, Request

    request = Request(
        Options(Logits(True, rows=True), accuracy=True, keep_logits=True), True, None, 2, 1 << 30
    )
    factor = torch.full((5,), 0.2, dtype=torch.float64)
    scales = [torch.rand(n, dtype=torch.float64) for n in (x.shape[1], 5)]
    plain = [*(t.detach() for t in (x, weight, bias)), *scales]
    for schedule in ("forward", "recompute"):
        settled = Request.parse(request.text.replace("None", f"'{schedule}'"))
        text = settled.needing((True, True, True, True), True).text
        torch.library.opcheck(
            torch.ops.codetta.linear_cross_entropy_forward.default, (*plain, target, factor, text)
        )
    lse = reference(*plain[:2], target)[1]
    torch.library.opcheck(
        torch.ops.codetta.linear_cross_entropy_backward.default,
        (*plain, target, lse, factor, None, text),
    )
