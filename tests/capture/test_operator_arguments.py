"""Texts that operators take are one line: generated code repeats them in comments."""

from __future__ import annotations

import capture_models
import torch
from helpers.cases import CASES, inputs
from helpers.spy import Spy
from torch._dynamo.backends import debugging
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import codetta
from codetta.ops import run_gemm, run_pointwise


class Graphs:
    """A backend without code generation; the texts in Dynamo's graphs and in those made of them."""

    def __init__(self):
        self.texts: list[tuple[str, str]] = []
        self.finish = aot_autograd(fw_compiler=self.collect)

    def __call__(self, module, example_inputs):
        self.collect(module, example_inputs)
        return self.finish(module, example_inputs)

    def collect(self, module, example_inputs):
        for node in module.graph.nodes:
            if getattr(node.target, "namespace", "") == "codetta":
                name = node.target._schema.name.removeprefix("codetta::")
                values = (*node.args, *node.kwargs.values())
                self.texts += [(name, x) for x in values if isinstance(x, str)]
        return make_boxed_func(module.forward)

    @property
    def names(self):
        return {name for name, _ in self.texts}


def assert_lines(texts):
    assert [x for x in texts if len(x[1].splitlines()) != 1] == []


def test_a_call_and_its_gradient():
    program = CASES["rms"]
    a, b, operands = inputs(program, (5,), 4, 3, torch.float32)
    graphs = Graphs()
    torch._dynamo.reset()
    function = torch.compile(codetta.gemm, backend=graphs, fullgraph=True)
    made = function(a.requires_grad_(), b, program, **operands)
    made.x.sum().backward()
    assert graphs.names == {"gemm", "pointwise"}
    assert_lines(graphs.texts)


def test_programs_without_gradients():
    """As Dynamo traces the calls, and as a dispatch mode sees them."""
    program = CASES["column_sums"]
    a, b, _ = inputs(program, (5,), 8, 3, torch.float32)
    (bare,) = codetta.vjp(CASES["silu"]).passes[:1]
    tiles = [torch.ones(5, 3)] * len(bare.operands)

    def function(a, b, r, tiles):
        types = (torch.float32, torch.float32)
        return run_gemm(program, a, b, [r]), run_pointwise(bare, tiles, 5, 3, *types)

    graphs = Graphs()
    torch._dynamo.reset()
    torch.compile(function, backend=graphs, fullgraph=True)(a, b, torch.ones(5, 1), tiles)
    with Spy() as spy:
        function(a, b, torch.ones(5, 1), tiles)
    assert graphs.names == set(spy.names) == {"gemm", "pointwise"}
    assert_lines(graphs.texts)
    assert_lines(spy.texts)


def test_a_model(monkeypatch):
    """Of its regions the graph has whole Plans; a dispatch mode sees the kernels of these."""
    graphs, model = Graphs(), capture_models.make("llama")
    monkeypatch.setattr(debugging, "aot_eager", graphs)
    torch._dynamo.reset()
    compiled = codetta.compile(model, backend="aot_eager", fullgraph=True)
    compiled(**capture_models.batch("llama")).loss.backward()
    assert "plan" in graphs.names
    assert_lines(graphs.texts)


def test_kernels_of_a_plan():
    decoder = codetta.nn.Decoder.from_hf(capture_models.make("llama"))
    ids = capture_models.batch("llama")["input_ids"]
    with Spy() as spy:
        decoder(ids, labels=ids).loss.backward()
    assert {"gemm", "pointwise", "prepare"} <= set(spy.names)
    assert_lines(spy.texts)
