"""What is fused, per model, in numbers that cannot regress; and that it is what Decoder runs."""

from __future__ import annotations

from collections import Counter
from functools import cache

import capture_models
import pytest
import torch
import twin

from codetta.capture.call import RegionCall
from codetta.language.types import Kind
from codetta.nn import Decoder
from codetta.nn.block import HALVES, compiled
from codetta.plan import Plan
from codetta.plan.schedule import Schedule

#: Kernels of a layer, forward and backward: GEMMs, finalizers, pointwise, moved, prepared weights.
#: In a layer's backward one pointwise kernel is the rotation's (or, without one, attention's
#: gradients scaled).
LLAMA = ((4, 2, 0, 0, 2), (8, 4, 1, 0, 2))
LAYER_NORM = ((4, 2, 0, 0, 6), (8, 8, 1, 0, 4))
MIDDLE = {
    "llama": LLAMA,
    "llama_tied": LLAMA,
    "mistral": LLAMA,
    "mistral_window": LLAMA,
    "titan": LLAMA,
    "granite": LLAMA,
    "qwen2": ((4, 2, 0, 0, 3), (8, 5, 1, 0, 3)),
    "qwen3": ((4, 2, 0, 0, 3), (8, 7, 1, 0, 3)),
    # A norm after a projection needs the whole row: one pointwise kernel, forward and backward.
    "gemma2": ((4, 4, 2, 0, 2), (8, 8, 3, 0, 2)),
    "gemma3": ((4, 4, 2, 0, 3), (8, 11, 3, 0, 3)),
    # gate and up are packed, so that swiglu's halves lie N/2 apart: one pointwise kernel.
    "phi3": ((4, 2, 1, 0, 2), (8, 4, 2, 2, 0)),
    "gpt2": LAYER_NORM,
    "nano_gpt": LAYER_NORM,
    # After its last norm BERT keeps the normalized value: it is the residual.
    "bert": ((4, 2, 1, 0, 7), (8, 8, 2, 0, 6)),
    # q and k are normalized over all heads, after which they are not one matrix with v.
    "olmo2": ((6, 4, 4, 0, 1), (12, 8, 6, 0, 1)),
    "stablelm": ((4, 2, 0, 0, 6), (8, 6, 1, 0, 6)),
    "gpt_neox": ((4, 1, 0, 0, 6), (8, 7, 2, 0, 4)),
    "cohere": ((4, 2, 1, 0, 4), (8, 5, 2, 0, 4)),
}


@cache
def calls(name: str, dtype: torch.dtype = torch.float32) -> list[RegionCall]:
    return [
        call
        for module, inputs in twin.captured(name, dtype).graphs
        for call in twin.rewritten(module, inputs)[1].calls
    ]


def schedules(call: RegionCall) -> tuple[Schedule, Schedule]:
    plan = call.shared_plan(HALVES)
    names = tuple(i.name for i in plan.inputs if i.type.kind is not Kind.ROTARY)
    both = compiled(plan, names, tuple(o.name for o in plan.outputs))
    assert both.backward is not None
    return both.forward, both.backward


def kernels(call: RegionCall) -> tuple[tuple[int, ...], ...]:
    kinds = ("gemm", "finalize", "pointwise", "move", "prepare")
    counts = (Counter(k.kind for k in part.kernels) for part in schedules(call))
    return tuple(tuple(count[kind] for kind in kinds) for count in counts)


@pytest.mark.parametrize("name", MIDDLE)
def test_kernels_of_a_layer(name):
    assert len(calls(name)) == 3
    assert kernels(calls(name)[1]) == MIDDLE[name]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gpt2"])
def test_no_product_is_computed_twice_where_values_are_rounded(name):
    """A value that is kept rounded and needed unrounded would cost its product again."""
    forward, backward = kernels(calls(name, torch.bfloat16)[1])
    assert (forward[0], backward[0]) == (MIDDLE[name][0][0], MIDDLE[name][1][0])


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_norms_gates_rotation_and_residuals_are_in_epilogues(name):
    """Left are the first norm's sum, whose producer is the embedding, and rotation's backward."""
    for i, call in enumerate(calls(name)):
        forward, backward = schedules(call)
        left = [k for k in forward.kernels if k.kind == "pointwise"]
        ops = {n.op for k in left for n in k.program.nodes}
        assert len(left) == (i == 0)
        assert ops <= {"operand", "mul", "rowsum", "round_to"}
        (turned,) = (k for k in backward.kernels if k.kind == "pointwise")
        assert any(n.op == "rotate" for n in turned.program.nodes) == (i < len(calls(name)) - 1)


def test_smollm2_layers_are_four_gemms_and_eight():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True, rope_theta=100000.0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids = torch.arange(8).view(1, 8)
    graphs = twin.capture(model, input_ids=ids, labels=ids, use_cache=False).graphs
    (report,) = (twin.rewritten(module, inputs)[1] for module, inputs in graphs)
    assert kernels(report.calls[1]) == LLAMA
    assert [kernels(c)[0][0] for c in report.calls] == [1, 4, 3]  # the head stays a plain product
    assert any("a head" in left.reason for left in report.left)


def test_equal_layers_share_a_plan():
    model = capture_models.make("llama", num_hidden_layers=6)
    ((module, inputs),) = twin.capture(model, **capture_models.batch("llama")).graphs
    found = twin.rewritten(module, inputs)[1].calls
    assert len(found) == 7
    assert len({id(call.shared_plan(HALVES)) for call in found}) == 3
    for call in found:  # and keep the graph's names for people
        assert {i.name for i in call.plan(HALVES).inputs} == set(call.shared_names) - {"is_qk"}


# ----------------------------------------------------------------------------------- Decoder
_COMMUTES = {"add", "mul"}


def canonical(plan: Plan, output: int) -> int:
    """A digest of what an output is made of, but for names, order of factors, and roundings.

    The graph rounds where its casts say so, which is not where Decoder's Plans do.
    """
    digest: dict[int, int] = {}
    for i, node in enumerate(plan.nodes):
        args = [digest[a] for a in node.args]
        if node.op == "round_to":
            digest[i] = args[0]
            continue
        attrs = tuple((k, v) for k, v in node.attrs if k not in ("name", "path"))
        if node.op in _COMMUTES:
            args.sort()
        digest[i] = hash((node.op, node.type.kind.value, node.type.cols, attrs, *args))
    return digest[output]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "llama_tied", "mistral", "qwen2", "qwen3"])
def test_a_layer_is_the_plan_that_decoder_runs(name, dtype):
    """Its operations are the same, forward and backward: what differs is which names inputs have,
    and that Decoder's entry and exit leave the embedding and the head to others."""
    theirs = Decoder.from_hf(capture_models.make(name, dtype)).plans()["middle"]
    ours = calls(name, dtype)[1].shared_plan(HALVES)
    found, expected = (
        sorted((canonical(p, o.node), o.scores_only) for o in p.outputs) for p in (ours, theirs)
    )
    assert found == expected
