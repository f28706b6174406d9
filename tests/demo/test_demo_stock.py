from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from codetta.demo.kernels import GEMM, MEMORY, launches, sums
from codetta.demo.models import hf_loss
from codetta.demo.stock import AttentionLayout, LayerShape, attention_layout, cost_table
from codetta.demo.trace import KernelTrace

CPU = torch.device("cpu")
SHAPES = [  # heads, key-value heads, batch, seq
    pytest.param(4, 2, 2, 9, id="gqa"),
    pytest.param(3, 1, 1, 16, id="mqa"),
    pytest.param(2, 2, 3, 5, id="mha"),
    pytest.param(4, 2, 1, 1, id="one token"),
]
DTYPES = [torch.float32, torch.bfloat16]


def watch(model: Any, batch: int, seq: int) -> Any:
    input_ids = torch.randint(0, model.config.vocab_size, (batch, seq))
    with KernelTrace(model) as trace:
        hf_loss(model)(input_ids).backward()
    return trace.rows("layers")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, kv_heads, batch, seq", SHAPES)
def test_the_formulas_are_what_is_watched_kernel_by_kernel(
    tiny_llama: Any, heads: int, kv_heads: int, batch: int, seq: int, dtype: torch.dtype
) -> None:
    model = tiny_llama(heads, kv_heads, dtype)
    shape = LayerShape.of(model.config, batch, seq)
    table = cost_table(shape, dtype, attention_layout(shape, dtype, CPU))
    assert launches(watch(model, batch, seq)) == launches(table)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, None])
def test_another_attention_changes_only_the_copies_around_it(
    tiny_llama: Any, backend: SDPBackend | None
) -> None:
    """As on a GPU without a fused kernel for the case: attention then stores head-major."""
    model = tiny_llama(4, 2)
    shape = LayerShape.of(model.config, 2, 9)
    with sdpa_kernel(backend) if backend is not None else nullcontext():
        layout = attention_layout(shape, torch.float32, CPU)
        watched = sums(watch(model, 2, 9))
    computed = sums(cost_table(shape, torch.float32, layout))
    assert {k: watched[k] for k in (GEMM, MEMORY)} == {k: computed[k] for k in (GEMM, MEMORY)}


def test_head_major_attention_costs_two_copies_a_layer() -> None:
    shape = LayerShape(batch=2, seq=8, layers=3, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8)
    token_major = sums(cost_table(shape, torch.float32))
    head_major = sums(cost_table(shape, torch.float32, AttentionLayout(False, False)))
    assert head_major[MEMORY].kernels == token_major[MEMORY].kernels + 2 * 3
    assert head_major[MEMORY].bytes - token_major[MEMORY].bytes == 3 * 2 * 4 * 16 * 8 * (4 + 2)


def test_a_layer_has_seven_gemms_forward_and_fourteen_backward() -> None:
    shape = LayerShape(batch=1, seq=4, layers=5, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8)
    assert sums(cost_table(shape, torch.bfloat16))[GEMM].kernels == 5 * (7 + 14)
