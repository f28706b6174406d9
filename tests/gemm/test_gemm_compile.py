"""Under torch.compile a call is one operator in a full graph, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from helpers.cases import CASES, differentiable, inputs

import codetta

NAMES = ["identity", "residual", "gated_halves", "rotated", "rms", "cross_entropy", "column_sums",
         "row_maximum", "arithmetic", "bare_reduction"]  # fmt: skip


def flat(out):
    return (out,) if isinstance(out, torch.Tensor) else tuple(out)


def check_compiled(name, backend, lead=(2, 3), dtype=torch.float32):
    """Outputs and gradients of the compiled call are bit for bit those of the eager one."""
    program = CASES[name]
    a, b, operands = inputs(program, lead, 4, 3, dtype)
    leaves = [a, b, *(operands[key] for key in differentiable(program))]
    for x in leaves:
        x.requires_grad_()

    def function(a, b, operands):
        return codetta.gemm(a, b, program, **operands)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    ours, theirs = compiled(a, b, operands), function(a, b, operands)
    assert type(ours) is type(theirs)
    cotangents = [torch.randn_like(y) for y in flat(ours)]
    gradients = [torch.autograd.grad(flat(out), leaves, cotangents) for out in (ours, theirs)]
    for x, y in zip((*flat(ours), *gradients[0]), (*flat(theirs), *gradients[1]), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", NAMES)
def test_fullgraph_forward_and_backward(name):
    check_compiled(name, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rms", "gated_halves"])
def test_fullgraph_with_inductor(name):
    check_compiled(name, "inductor")


def test_the_graph_holds_the_operator_and_nothing_of_the_language():
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    a, b, operands = inputs(CASES["rms"], (5,), 4, 3)
    torch._dynamo.reset()
    function = torch.compile(codetta.gemm, backend=backend, fullgraph=True)
    function(a, b, CASES["rms"], **operands)
    calls = [n for n in graphs[0].graph.nodes if n.op in ("call_function", "call_method")]
    operators = [n for n in calls if n.target is torch.ops.codetta.gemm.default]
    assert len(operators) == 1
    assert operators[0].args[0] == CASES["rms"].line


def test_another_number_of_tokens_recompiles_once_at_most():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    program = CASES["gated_adjacent"]

    def function(a, b, r):
        return codetta.gemm(a, b, program, r=r).y

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for m in (5, 6, 9, 33, 128):
        a, b, operands = inputs(program, (m,), 4, 3)
        a.requires_grad_()
        out = compiled(a, b, operands["r"])
        out.sum().backward()
        torch.testing.assert_close(out, function(a, b, operands["r"]))
    assert counter.frame_count <= 2


def test_two_programs_in_one_function_are_two_operators():
    a, b, operands = inputs(CASES["rms"], (5,), 3, 4)
    w = torch.randn(3, 6, dtype=torch.float64)

    def function(a, b, w, residual):
        rms = codetta.gemm(a, b, CASES["rms"], residual=residual)
        return codetta.gemm(rms.x, w, CASES["gated_adjacent"], r=rms.r).y

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    args = (a, b, w, operands["residual"])
    assert torch.equal(compiled(*args), function(*args))


def test_options_work_in_a_graph():
    a, b, _ = inputs(CASES["identity"], (5,), 8, 3, torch.float32)
    program = CASES["column_sums"]

    def function(a, b, target, out, r):
        with torch.autocast("cpu", torch.bfloat16):
            cast = codetta.gemm(a, b)
        codetta.gemm_accumulate_(target, a, b)
        codetta.gemm(a, b, out=out)
        raw = codetta.gemm(a, b, program, r=r, raw=True, tile=(2, 3))
        rows = codetta.ops.run_gemm(program, a, b, [r[:, None]], raw=True, tile=(2, 3))
        return cast, target, out, codetta.gemm(a, b, program, r=r), raw, rows

    def arguments():
        return a, b, torch.ones(5, 8), torch.empty(5, 8), torch.ones(5)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments()), function(*arguments()), rtol=0, atol=0)


def test_a_wrong_out_is_refused_in_a_graph_too():
    torch._dynamo.reset()
    compiled = torch.compile(codetta.gemm, backend="aot_eager")
    with pytest.raises(Exception, match=r"its shape is \(1, 4\), the result's is \(2, 4\)"):
        compiled(torch.ones(2, 3), torch.ones(3, 4), out=torch.empty(1, 4))


def test_module_with_parameters_and_checkpointing():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 3, dtype=torch.float64))

        def forward(self, x):
            return codetta.gemm(x, self.weight.t(), CASES["silu"])

    layer, x = Layer(), torch.randn(5, 3, dtype=torch.float64)

    def loss(run):
        layer.weight.grad = None
        run(x).pow(2).sum().backward()
        return layer.weight.grad

    plain = loss(layer)
    checkpoint = torch.utils.checkpoint.checkpoint
    assert torch.equal(loss(lambda x: checkpoint(layer, x, use_reentrant=False)), plain)
    torch._dynamo.reset()
    assert torch.equal(loss(torch.compile(layer, backend="aot_eager", fullgraph=True)), plain)
