"""What a layer saves for its backward: by the Plan, measured, and beside torch.compile."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from decoder_models import transformers  # noqa: F401 - skips where it is absent

from codetta.nn import Spec
from codetta.nn.block import ENTRY

TOOL = Path(__file__).resolve().parents[2] / "tools" / "saved_set.py"
D, F, H = 2048, 8192, 16


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(TOOL))


def formula(d: int, f: int, heads: int) -> int:
    """Bytes per token in bf16 with as many kv heads: x twice, gate and up, q k v, o, lse, two r."""
    return 2 * 2 * d + 2 * 2 * f + 2 * 3 * d + 2 * d + 4 * heads + 2 * 4


def test_the_plan_saves_x_twice_the_preactivations_and_what_attention_needs(tool):
    spec = Spec(ENTRY, D, F, H, H, D // H, D // H)
    assert sum(tool["computed"](spec).values()) == formula(D, F, H) == 57_416


def test_a_running_decoder_saves_what_the_plan_says(tool):
    model = tool["build"](64, 256, 4)
    assert tool["measured"](model) == formula(64, 256, 4)


def test_less_than_torch_compile_saves(tool):
    model = tool["build"](64, 256, 4)
    assert formula(64, 256, 4) <= tool["partitioner"](model)


@pytest.mark.slow
def test_less_than_torch_compile_saves_at_the_size_of_a_1b_model(tool):
    model = tool["build"](D, F, H)
    assert tool["measured"](model) == formula(D, F, H) <= tool["partitioner"](model)
