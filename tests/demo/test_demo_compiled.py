from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from codetta.demo import models
from codetta.demo.compiled import CompiledModel
from codetta.demo.kernels import launches, sums
from codetta.demo.trace import KernelTrace
from codetta.nn import Decoder
from codetta.nn.block import HALVES
from codetta.nn.cost import plan_cost
from codetta.nn.decoder import trained
from codetta.plan import Plan, schedule
from codetta.plan.operator import Traced

CPU = torch.device("cpu")


def one_step(dtype: torch.dtype = torch.float32) -> tuple[CompiledModel, Any, KernelTrace]:
    model = models.copy_of(models.small_random(0).model, dtype, CPU)
    compiled = CompiledModel(model)
    with KernelTrace(model, compiled=True) as trace:
        compiled.loss(torch.arange(64).reshape(2, 32)).backward()
    return compiled, model, trace


def kernels(plan: Plan, dtype: torch.dtype) -> Counter[tuple[str, str, int]]:
    rows = plan_cost(plan, trained(plan), tokens=64, positions=32, dtype=dtype)
    return Counter((row.kind, row.role, row.bytes) for row in rows)


def by_size(rows: Any) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    for (kind, _, size), count in launches(rows).items():
        found[kind, size] += count
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_layer_runs_the_kernels_of_the_decoder(dtype: torch.dtype) -> None:
    """The same launches, byte for byte, forward and backward, from either form's Plan."""
    compiled, model, _ = one_step(dtype)
    entry, middle, last = (c.plan(HALVES) for c in compiled.compiler.rewritten[0].calls)
    explicit = Decoder.from_hf(model).plans()
    assert kernels(middle, dtype) == kernels(explicit["middle"], dtype)
    # The decoder's entry also hands its input on, whose gradient it adds.
    assert sum(k == "gemm" for k, _, _ in kernels(entry, dtype).elements()) == 3
    assert sum(k == "gemm" for k, _, _ in kernels(last, dtype).elements()) == 9


def test_the_layers_plan_is_the_decoders_plan_but_for_names() -> None:
    compiled, model, _ = one_step()
    explicit = Decoder.from_hf(model).plans()["middle"]
    found = compiled.compiler.rewritten[0].calls[1].plan(HALVES)

    def operations(plan: Plan) -> Counter[Any]:
        # In fp32 rounding is no operation, and the captured graph has none.
        named = ((n.op, n.type, tuple(a for a in n.attrs if a[0] != "name")) for n in plan.nodes)
        return Counter(x for x in named if x[0] != "round_to")

    assert operations(found) == operations(explicit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_watched_programs_are_those_of_the_formulas(dtype: torch.dtype) -> None:
    compiled, _, trace = one_step(dtype)
    computed = compiled.cost_table(tokens=64, positions=32, dtype=dtype, device=CPU)
    seen = trace.rows("programs")
    assert by_size(seen) == by_size(computed)
    assert len(seen) > 50


def test_a_fused_layer_is_counted_with_the_tiles_of_its_launches(
    fused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2-135M's layer, 128 tokens, in tiles that are not the reference's 128 x 128.

    Moves of a schedule (rows of a weight's gradient, permuted back) count as its kernels.
    """
    import transformers

    from codetta.backends.cuda.launch import CUDA

    CUDA.forget()
    monkeypatch.setattr("codetta.backends.cuda.configs._for_heavy", lambda lowered, legal: [])
    config = transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=2048, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    device = torch.get_default_device()
    model = transformers.LlamaForCausalLM(config)
    model = models.copy_of(model, torch.bfloat16, device)
    compiled = CompiledModel(model)
    with KernelTrace(model, compiled=True) as trace:
        compiled.loss(torch.arange(128, device=device)[None]).backward()
    seen = by_size(trace.rows("programs"))

    def computed() -> Counter[tuple[str, int]]:
        table = compiled.cost_table(tokens=128, positions=128, dtype=torch.bfloat16, device=device)
        return by_size(table)

    assert seen == computed()
    CUDA.forget()  # what was chosen here
    monkeypatch.setattr("codetta.demo.compiled.tiling_for", lambda x: None)
    assert seen != computed()  # the sizes can tell


def test_a_later_step_is_watched_as_the_first_was_and_compiles_nothing() -> None:
    compiled, model, first = one_step()
    with KernelTrace(model, compiled=True) as again:
        compiled.loss(torch.arange(64).reshape(2, 32)).backward()
    assert launches(again.rows("programs")) == launches(first.rows("programs"))
    assert len(compiled.compiler.rewritten) == 1


def test_attention_is_seen_by_its_name_in_a_compiled_model() -> None:
    _, _, trace = one_step()
    regions = trace.regions()
    assert sums(regions["other"])["attention"].kernels == 4
    assert sums(regions["programs"])["attention"].kernels == 0


def test_a_schedule_that_is_one_operator_is_opened() -> None:
    compiled, _, _ = one_step()
    plan = compiled.compiler.rewritten[0].calls[2].plan(HALVES)
    traced = Traced(schedule(plan))
    inputs = []
    for given in traced.plan.inputs:
        rows = (8 if given.type.rows == "M" else int(given.type.rows),)
        inputs.append(torch.randn(*(rows if given.type.has_rows else ()), int(given.type.cols)))
    with KernelTrace(compiled=True) as trace:
        torch.ops.codetta.plan(traced.text, inputs)
    expected = plan_cost(plan, (), tokens=8, positions=8, dtype=torch.float32)
    assert [(r.kind, r.bytes) for r in trace.kernels] == [(r.kind, r.bytes) for r in expected]
    assert len(expected) > 4 and trace.rows("programs") == trace.kernels
