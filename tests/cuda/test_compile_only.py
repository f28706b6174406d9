"""Kernels compiled for GPUs that are not here: they exist, use tensor cores and spill nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from codetta import programs
from codetta.backends.cuda.available import missing_package
from codetta.backends.cuda.launch import explain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing_package() is not None, reason=f"{missing_package()}"),
]

SCRIPT = Path(__file__).with_name("compile_kernels.py")
CATALOG = {n: e.program for n, e in programs.catalog().items() if e.program.has_acc}
FUSED = [n for n, program in CATALOG.items() if explain(program) is None]
PING_PONG = "128x192 pp 2x1"
TOGETHER = "256x128 coop 2x1"
#: The configuration each program gets where it is not ping-pong over 128 x 192.
CONFIGURATIONS = {
    "swiglu_backward": "128x128 pp 2x1",
    "swiglu_backward_unscaled": "128x128 pp 2x1",
    "geglu_backward": "128x128 pp 2x1",
    "row_scale_rotary": "192x128 pp 2x1",
    **dict.fromkeys(
        (
            *("residual_ssq", "residual_rms", "layernorm_statistics", "layernorm_apply_gelu"),
            *("row_scale_lse_target", "cross_entropy_backward", "rms_link_dgrad"),
            *("rms_link_dgrad_folded", "rms_link_dgrad_frozen", "rms_link_dgrad_unscaled"),
            *("rms_link_wgrad", "bias_gelu_backward", "layernorm_gelu_backward"),
            *("layernorm_link_dgrad", "layernorm_link_wgrad"),
        ),
        TOGETHER,
    ),
}  # fmt: skip
#: STL instructions where there are any, (program, ragged axes): quack-kernels 0.6.5, sm_90a.
SPILLS = {("row_scale_lse_target", "n"): 1}
RAGGED = [("row_scale_lse_target", "n"), ("layernorm_statistics", "n"), ("rms_link_wgrad", "m")]
BLACKWELL = [
    *("row_scale", "residual_ssq", "row_scale_swiglu", "swiglu_backward", "row_scale_rotary"),
    *("row_scale_lse_target", "cross_entropy_backward"),
]


def compile_all(sm: str, entries: list[list[str]], folder: Path) -> dict[str, dict]:
    listing = folder / "programs.json"
    listing.write_text(json.dumps(entries))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), sm, str(listing)],
        capture_output=True,
        text=True,
        env=os.environ | environment(sm, str(folder / "cache")),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def environment(sm: str, cache: str) -> dict[str, str]:
    os.makedirs(cache, exist_ok=True)
    arch = {"90": "sm_90a", "100": "sm_100a"}[sm]
    return {"QUACK_ARCH": sm, "CUTE_DSL_ARCH": arch, "QUACK_CACHE_DIR": cache}


@pytest.fixture(scope="module")
def hopper(tmp_path_factory):
    entries = [[name, CATALOG[name].text, "bf16", ""] for name in FUSED]
    entries += [[f"{n} {axes}", CATALOG[n].text, "fp16", axes] for n, axes in RAGGED]
    return compile_all("90", entries, tmp_path_factory.mktemp("sm90"))


@pytest.fixture(scope="module")
def blackwell(tmp_path_factory):
    entries = [[name, CATALOG[name].text, "bf16", ""] for name in BLACKWELL]
    return compile_all("100", entries, tmp_path_factory.mktemp("sm100"))


@pytest.mark.parametrize("name", FUSED)
def test_a_program_compiles_for_hopper_without_spills(hopper, name):
    made = hopper[name]
    assert made.get("error") is None, made
    assert made["config"] == CONFIGURATIONS.get(name, PING_PONG)
    assert made["tensor_ops"] > 0
    assert made["spills"] == SPILLS.get((name, ""), 0)


@pytest.mark.parametrize("name, axes", RAGGED)
def test_edges_cost_few_registers(hopper, name, axes):
    made = hopper[f"{name} {axes}"]
    assert made.get("error") is None, made
    assert made["spills"] == SPILLS.get((name, axes), 0)


@pytest.mark.parametrize("name", BLACKWELL)
def test_a_program_compiles_for_blackwell(blackwell, name):
    made = blackwell[name]
    assert made.get("error") is None, made
    assert made["tensor_ops"] > 0


DIGESTS = """
from codetta.language import epilogue, exp, log
from codetta.backends.cuda.lowering import lower
from codetta.backends.cuda.quack import epilogue as built

def made(function):
    @epilogue
    def same(acc):
        return function(acc)
    return lower(same, "bf16").source

print(*(built(made(f)).semantic_digest for f in (exp, log, exp)))
"""


def test_quack_tells_programs_apart(tmp_path):
    """Its cache key saw no difference between two closures of one factory, nor exp from log."""
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS],
        capture_output=True,
        text=True,
        env=os.environ | environment("90", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    first, second, again = done.stdout.split()
    assert first == again != second
