"""``codetta.compile`` and ``torch.compile(model, backend="codetta")``: options, scope, counts."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import partial

import capture_models
import pytest
import torch
from torch import nn

import codetta
from codetta import errors
from codetta.capture import backend
from codetta.capture.compile import inductor_options


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def regions(compiled):
    return [len(r.calls) for r in compiled.codetta_compiler.rewritten]


def test_one_model_is_compiled_and_its_twin_is_not():
    first = capture_models.make("llama")
    second, batch = copy.deepcopy(first), capture_models.batch("llama")
    compiled = codetta.compile(first)
    compiled(**batch)
    assert regions(compiled) == [3]
    calls = []
    plain = torch.compile(second, backend=lambda module, inputs: calls.append(module) or module)
    plain(**batch)
    assert regions(compiled) == [3]
    assert len(calls) == 1
    assert not any("codetta" in str(n.target) for n in calls[0].graph.nodes)


def test_each_compiled_model_has_a_compiler_of_its_own():
    a, b = (codetta.compile(capture_models.make("llama")) for _ in range(2))
    batch = capture_models.batch("llama")
    a(**batch)
    assert (regions(a), regions(b)) == ([3], [])
    b(**batch)
    assert (regions(a), regions(b)) == ([3], [3])


def test_the_model_itself_stays_uncompiled():
    model = capture_models.make("llama")
    compiled = codetta.compile(model)
    model(**capture_models.batch("llama"))
    assert regions(compiled) == []
    assert not {"forward", "codetta_compiler"} & vars(model).keys()


def test_it_decorates_a_function():
    model = capture_models.make("llama")

    @codetta.compile(fullgraph=True)
    def step(batch):
        return model(**batch).loss

    batch = capture_models.batch("llama")
    torch.testing.assert_close(step(batch), model(**batch).loss)
    assert regions(step) == [3]


@pytest.mark.parametrize("rest", ["eager", "aot_eager"])
def test_backends_without_code_generation_agree(rest):
    model, batch = capture_models.make("llama"), capture_models.batch("llama")
    compiled = codetta.compile(model, backend=rest, fullgraph=True)
    torch.testing.assert_close(compiled(**batch).loss, model(**batch).loss)
    assert regions(compiled) == [3]


def test_mode_and_options_are_combined_and_options_win():
    found = inductor_options("max-autotune", {"max_autotune": False, "epilogue_fusion": True})
    assert found["triton.cudagraphs"] is True
    assert found["coordinate_descent_tuning"] is True
    assert found["max_autotune"] is False
    assert found["epilogue_fusion"] is True
    compiled = codetta.compile(
        nn.Linear(4, 4), mode="reduce-overhead", options={"shape_padding": False}
    )
    assert compiled.codetta_compiler.options == {"triton.cudagraphs": True, "shape_padding": False}
    assert inductor_options("default") == inductor_options() == {}


@pytest.mark.parametrize("by_name", [False, True])
def test_a_mode_reaches_inductor_with_the_rewritten_graph(by_name, monkeypatch):
    """reduce-overhead is CUDA graphs: Inductor makes them of the whole graph, Plans included."""
    from torch._inductor import compile_fx

    seen = []

    def compiled(module, inputs, config_patches=None, **options):
        seen.append((config_patches, [str(n.target) for n in module.graph.nodes]))
        return module.forward

    monkeypatch.setattr(compile_fx, "compile_fx", compiled)
    model, batch = capture_models.make("llama"), capture_models.batch("llama")
    if by_name:
        monkeypatch.setattr(backend, "Compiler", partial(backend.Compiler, "inductor"))
        made = torch.compile(model, backend="codetta", mode="reduce-overhead")
    else:
        made = codetta.compile(model, backend="inductor", mode="reduce-overhead")
    made(**batch)
    ((options, nodes),) = seen
    assert options == {"triton.cudagraphs": True}
    assert sum("codetta region" in n for n in nodes) == 3


@pytest.mark.parametrize("given", [{"backend": "fast"}, {"logits": "some"}, {"mode": "slow"}])
def test_an_unknown_value_is_refused(given):
    with pytest.raises(errors.UnknownOption, match=next(iter(given))):
        codetta.compile(nn.Linear(4, 4), **given)


def test_three_lengths_are_two_compilations():
    model = capture_models.make("llama")
    compiled = codetta.compile(model, fullgraph=True)
    for tokens in (6, 9, 13):
        batch = capture_models.batch("llama", tokens=tokens)
        torch.testing.assert_close(compiled(**batch).loss, model(**batch).loss)
    assert regions(compiled) == [3, 3]


def test_a_marked_length_is_compiled_once():
    model = capture_models.make("llama")
    compiled = codetta.compile(model, fullgraph=True)
    for tokens in (6, 9, 13):
        batch = capture_models.batch("llama", tokens=tokens)
        torch._dynamo.mark_dynamic(batch["input_ids"], 1)
        torch.testing.assert_close(compiled(**batch).loss, model(**batch).loss)
    assert regions(compiled) == [3]


def test_one_token_runs_and_is_left_alone():
    model = capture_models.make("llama")
    compiled = codetta.compile(model)
    ids = capture_models.batch("llama", tokens=1, rows=1)["input_ids"]
    assert torch.equal(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    assert regions(compiled) == [0]


_ENTRY = """
import sys, torch
assert "codetta" not in sys.modules
m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.Linear(8, 8))
c = torch.compile(m, backend="codetta", fullgraph=True)
x = torch.randn(3, 8)
torch.testing.assert_close(c(x), m(x))
assert sys.modules["codetta.capture.backend"]
print("found", "codetta" in torch._dynamo.list_backends())
"""


def test_torch_compile_finds_the_backend_by_name():
    done = subprocess.run([sys.executable, "-c", _ENTRY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["found", "True"]
