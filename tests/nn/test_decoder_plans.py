"""How a decoder runs: its Plans, how many kernels a layer takes, and the cost table."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from decoder_models import FAMILIES, make, step, tokens

from codetta.demo.kernels import sums
from codetta.demo.trace import KernelTrace
from codetta.language.types import Kind
from codetta.nn import Decoder, Spec, segment_plan
from codetta.nn.block import segment
from codetta.plan import Plan, evaluate

SIZES = {"hidden": 8, "mlp": 12, "heads": 2, "kv_heads": 1, "head_dim": 4, "rotary_dim": 4}


def kernels(decoder: Decoder, part: str, kind: str) -> int:
    return sum(k.kind == kind for k in decoder.schedules()[part].kernels)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_four_gemms_forward_and_eight_backward(family):
    decoder = Decoder.from_hf(make(family))
    assert kernels(decoder, "middle", "gemm") == 4
    assert kernels(decoder, "middle backward", "gemm") == 8
    assert kernels(decoder, "entry", "gemm") + kernels(decoder, "exit", "gemm") == 4
    assert (
        kernels(decoder, "entry backward", "gemm") + kernels(decoder, "exit backward", "gemm") == 8
    )


def test_no_pointwise_kernel_but_the_rotations_backward():
    decoder = Decoder.from_hf(make())
    assert kernels(decoder, "middle", "pointwise") == 0
    assert kernels(decoder, "middle backward", "pointwise") == 1
    for part in ("middle", "middle backward"):
        assert kernels(decoder, part, "move") == 0


def test_the_head_is_three_gemms_and_prepares_no_weight():
    decoder = Decoder.from_hf(make())
    assert kernels(decoder, "head", "gemm") == 1
    assert kernels(decoder, "head backward", "gemm") == 2
    for part in ("head", "head backward"):
        assert kernels(decoder, part, "prepare") == 0


@pytest.mark.parametrize("shape", [(1, 24), (2, 150)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_cost_table_is_what_runs(dtype, shape):
    decoder, ids = Decoder.from_hf(make("qwen3", dtype)), tokens(*shape)
    with KernelTrace() as trace:
        step(decoder, ids)
    table = decoder.cost_table(tokens=ids.numel(), dtype=dtype, positions=shape[1])
    assert sums(table) == sums(trace.regions()["layers"])


def test_the_cost_table_counts_partials_by_the_tiles_of_the_backend_that_runs(backend):
    """Of a layer of SmolLM2-135M, whose fused wgrads do not take the reference's tile."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9}
    model = make(dtype=torch.bfloat16, **sizes, num_key_value_heads=3, max_position_embeddings=128)
    decoder, ids = Decoder.from_hf(model), tokens(1, 128)
    with KernelTrace() as trace:
        step(decoder, ids)
    table = decoder.cost_table(tokens=128, dtype=torch.bfloat16)
    seen = Counter((x.kind, x.bytes) for x in trace.regions()["layers"] if x.kind != "attention")
    computed: Counter[tuple[str, int]] = Counter()
    for row in table:
        computed[row.kind, row.bytes] += row.count if row.kind != "attention" else 0
    assert seen == +computed


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("biases", [(), ("wq", "wk", "wv"), ("wo", "wg", "wu", "wd")])
@pytest.mark.parametrize("part", ["entry", "middle", "exit"])
def test_a_segment_means_what_the_model_says(part, biases, qk_norm):
    spec = Spec(part, **SIZES, biases=frozenset(biases), qk_norm=qk_norm)
    plain, fused = segment_plan(spec), segment(spec)
    g = torch.Generator().manual_seed(0)
    inputs = {}
    for i in plain.inputs:
        rows = [5 if i.type.rows == "M" else int(i.type.rows)] if i.type.kind is Kind.TILE else []
        shape = (*rows, int(i.type.cols))
        inputs[i.name] = torch.randn(shape, generator=g, dtype=torch.float64)
    if "rope" in inputs:
        angles = torch.randn(5, 2, generator=g, dtype=torch.float64)
        inputs["rope"] = torch.cat((angles.cos(), angles.sin()), dim=1)
    if "is_qk" in inputs:
        inputs["is_qk"] = torch.tensor([1.0] * 12 + [0.0] * 4, dtype=torch.float64)
    found, expected = evaluate(fused, **inputs), evaluate(plain, **inputs)
    for name, y in expected.items():
        torch.testing.assert_close(found[name], y, rtol=1e-12, atol=1e-12)


def test_equal_layers_share_their_schedules():
    one, two = Decoder.from_hf(make()), Decoder.from_hf(make(num_hidden_layers=3))
    assert one.spec == two.spec
    assert one.plans()["middle"] is two.plans()["middle"]


def test_plans_and_schedules_print():
    decoder = Decoder.from_hf(make("llama_biases"))
    for plan in decoder.plans().values():
        assert Plan.parse(str(plan)) == plan
    for name, schedule in decoder.schedules().items():
        assert str(schedule).startswith(f"schedule of {name.replace(' ', '_')}")


def test_the_example_of_the_page_runs(capsys):
    page = Path(__file__).resolve().parents[2] / "docs" / "decoder.md"
    example = re.search(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {}
    exec(example[1], names)
    assert all(p.grad is not None for p in names["model"].parameters())
    assert "schedule of middle_backward" in capsys.readouterr().out
