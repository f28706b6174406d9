"""The cost table against a dispatch trace of the schedule it describes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from plan_oracle import Tensors, cotangents_of, for_run, random_inputs
from plan_samples import LAYER_NORM, decoder_layer, fused, layer_norm_link
from plan_strategies import TOKENS, examples, plans
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from codetta.language.types import Kind
from codetta.plan import Cost, Plan, Split, cost_table, evaluate, run, schedule, totals
from codetta.plan.cost import program_work

#: Kernels that are plain PyTorch operations and so are absent from a trace of the library's.
PLAIN = ("move", "opaque")
DTYPES = [torch.bfloat16, torch.float32]


class Trace(TorchDispatchMode):
    """(bytes of all tensor arguments, bytes of all results) of each library operator called."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[int, int]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace == "codetta":
            self.launches.append((bytes_of((args, kwargs)), bytes_of(result)))
        return result


def bytes_of(tree: Any) -> int:
    tensors = (x for x in tree_leaves(tree) if isinstance(x, torch.Tensor))
    return sum(x.numel() * x.itemsize for x in tensors)


def typed(inputs: Tensors, plan: Plan, dtype: torch.dtype) -> Tensors:
    """Matrices and parameters in ``dtype``; rotary tables and vectors over tokens in fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    types = {i.name: i for i in plan.inputs}
    return {
        n: x.to(dtype if n not in types or narrow(types[n]) else wide) for n, x in inputs.items()
    }


def narrow(i: Any) -> bool:
    return i.type.kind is Kind.TILE or i.role == "parameter"


def traced(plan: Plan, known: Tensors, dtype: torch.dtype, m: int) -> tuple[Tensors, bool]:
    """Results of the schedule, and whether its table equals the trace, kernel by kernel."""
    found = schedule(plan)
    with Trace() as trace:
        results = run(found, for_run(typed(known, plan, dtype), plan))
    rows = [r for r in cost_table(found, tokens=m, dtype=dtype) if r.role not in PLAIN]
    return results, [(r.bytes_read, r.bytes_written) for r in rows] == trace.launches


def agrees(parts: Split, m: int, dtype: torch.dtype) -> bool:
    inputs = random_inputs(parts.forward, m) | random_inputs(parts.backward, m)
    forward, right = traced(parts.forward, inputs, dtype, m)
    if not parts.backward.outputs:
        return right
    return right and traced(parts.backward, inputs | forward, dtype, m)[1]


LAYERS = {
    "small": fused(decoder_layer()),
    "bias": fused(decoder_layer(bias=True)),
    "many tiles": fused(decoder_layer(136, 140, 40, 1, 4)),
    "LayerNorm": fused(layer_norm_link(), forward=LAYER_NORM),
    "frozen": fused(decoder_layer(), wrt=["o", "x0", "g1"]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("m", [5, 300])
@pytest.mark.parametrize("layer", LAYERS)
def test_bytes_and_kernels_equal_a_dispatch_trace(layer: str, m: int, dtype: torch.dtype) -> None:
    assert agrees(LAYERS[layer], m, dtype)


@examples(20)
@given(plan=plans(), m=TOKENS)
def test_bytes_of_random_plans_equal_a_dispatch_trace(plan: Plan, m: int) -> None:
    assert agrees(fused(plan), m, torch.bfloat16)


def test_a_table_for_other_sizes_does_not_match() -> None:
    """The trace can tell: one token more is another number of bytes."""
    plan = LAYERS["small"].forward
    inputs = random_inputs(plan, 6)
    found = schedule(plan)
    with Trace() as trace:
        run(found, for_run(typed(inputs, plan, torch.bfloat16), plan))
    table = cost_table(found, tokens=5)
    assert [(r.bytes_read, r.bytes_written) for r in table] != trace.launches


def test_a_table_says_what_bounds_a_kernel() -> None:
    table = cost_table(schedule(LAYERS["small"].forward), tokens=4096)
    found = totals(table)
    assert found["gemm"]["kernels"] == 4 and found["memory"]["kernels"] == 4
    assert sum(r.bytes for r in table) == sum(kind["bytes"] for kind in found.values())


def test_totals_count_repeated_layers() -> None:
    row = Cost("layer.v1", "gemm", "gemm", 10, 5, 100, 0, count=3)
    assert totals([row]) == {"gemm": {"kernels": 3, "bytes": 45}}


def test_flops_are_those_of_the_contraction_and_the_epilogue() -> None:
    """2 M N K, plus the COST table's operations per element of the epilogue."""
    found = schedule(LAYERS["small"].forward)
    table = cost_table(found, tokens=7)
    gemms = [k for k in found.kernels if k.kind == "gemm"]
    rows = [r for r in table if r.role == "gemm"]
    shapes = [(8, 16), (24, 8), (8, 12), (32, 8)]
    for kernel, row, (n, k) in zip(gemms, rows, shapes, strict=True):
        assert kernel.program is not None
        flops, special = program_work(kernel.program)
        assert row.flops == 2 * 7 * n * k + int(flops * 7 * n)
        assert row.special == int(special * 7 * n)


def test_rotary_tables_count_by_their_positions() -> None:
    forward = LAYERS["small"].forward
    few, many = (
        sum(r.bytes for r in cost_table(schedule(forward), tokens=5, positions=p)) for p in (5, 105)
    )
    assert many - few == 100 * 4 * 4


def test_the_library_runs_in_the_dtype_that_the_table_assumes() -> None:
    """Matrices leave in the operand dtype, vectors over tokens in fp32."""
    parts = LAYERS["small"]
    inputs = random_inputs(parts.forward, 5)
    found, _ = traced(parts.forward, inputs, torch.bfloat16, 5)
    exact = evaluate(parts.forward, **inputs)
    dtypes = {n: found[n].dtype for n in exact}
    assert {n for n, d in dtypes.items() if d is torch.float32} == {
        n for n, x in exact.items() if x.ndim == 1
    }
    gradients, _ = traced(parts.backward, inputs | found | cotangents_of(exact), torch.bfloat16, 5)
    assert {x.dtype for x in gradients.values()} == {torch.bfloat16}
