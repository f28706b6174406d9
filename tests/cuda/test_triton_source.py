"""Generated sources: identity, completeness of the table, and what a compiler makes of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from codetta.backends.cuda.triton_lowering import LOWERING
from codetta.backends.cuda.triton_source import source
from codetta.backends.cuda.triton_stages import cut, stages
from codetta.backends.cuda.triton_task import Array
from codetta.errors import MissingRule
from codetta.language import Col, Row, Tile, colsum, finalizer, rowsum

HERE = Path(__file__).parent


def program(scale: float):
    @finalizer
    def scaled(x: Tile, r: Col, w: Row):
        y = x * r * w * scale
        return {"y": y, "s": rowsum(y), "c": colsum(y)}

    return scaled


def first_source(made, n=64, dtype="bf16", contiguous=True):
    task = stages(made, dtype, "fp32", False).first
    arrays = tuple(
        Array(dtype if role == "tile" else "fp32", contiguous, False)
        for _, roles in task.tensors.values()
        for role in roles
    )
    return source(task, cut(task, n, None), arrays, frozenset())


def test_the_table_covers_every_primitive():
    assert not list(LOWERING.missing())
    assert {"acc", "const", "extent", "operand"}.isdisjoint(LOWERING._rules)


@pytest.mark.parametrize("name", ["mul", "rowsum"])
def test_a_missing_entry_names_primitive_and_table(name, monkeypatch):
    monkeypatch.delitem(LOWERING._rules, name)
    with pytest.raises(MissingRule, match=f"'{name}'.*'LOWERING'.*triton_lowering"):
        first_source(program(2.0))


def test_different_programs_never_share_a_kernel():
    sources = [
        first_source(program(2.0)),
        first_source(program(2.0 + 2**-50)),
        first_source(program(2.0), dtype="fp16"),
        first_source(program(2.0), contiguous=False),
        first_source(program(2.0), n=4),
    ]
    assert len({s.name for s in sources}) == len(sources)
    assert first_source(program(2.0)) == sources[0]


def test_sizes_are_arguments_and_sums_have_a_fixed_order():
    made = first_source(program(2.0), n=4096)
    assert {p.what for p in made.parameters} >= {"M", "cols", "row"}
    assert "atomic" not in made.text
    assert made.text.startswith("import triton\nimport triton.language as tl\n\n\n@triton.jit")
    integers = re.search(r"do_not_specialize=(\[.*?\])", made.text)
    assert integers and all(repr(p.name) in integers[1] for p in made.parameters if p.is_integer)


def test_importing_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import codetta, codetta.backends.cuda.triton_kernels, codetta.backends.cuda.triton_prepare"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


COMPILED = (
    "rotary_backward_halves", "rotary_backward_adjacent", "qk_norm_rotary_backward_halves",
    "layernorm_apply_backward", "layernorm_gelu_backward", "swiglu_backward", "rms_link_dgrad",
    "row_scale_bias_backward", "row_scale_lse_target_backward_1", "cross_entropy_backward",
    "case_swapped_halves", "case_row_statistics", "rms_scale",
)  # fmt: skip


def test_kernels_compile_for_hopper_without_spills_and_with_wide_accesses():
    pytest.importorskip("triton", reason="compiling needs Triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "compile_triton.py"), *COMPILED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    made = json.loads(done.stdout)
    assert len(made) > len(COMPILED)
    assert {k for k, v in made.items() if v["spills"]} == set()
    for name in ("rotary_backward_halves/rotary_backward", "rms_link_dgrad/rms_link_dgrad"):
        # Tiles move 16 bytes at a time; what is narrower is one number per row.
        assert made[name]["loads"].count(16) > 3 * sum(w < 16 for w in made[name]["loads"])
        assert made[name]["stores"].count(16) >= sum(w < 16 for w in made[name]["stores"])
