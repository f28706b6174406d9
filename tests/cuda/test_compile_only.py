"""Kernels compiled for GPUs that are not here: they use tensor cores, spill nothing and overlap.

Every library program and every GEMM of a decoder's segments (:mod:`kernels`), for Hopper in the
configuration the backend chooses, and for Blackwell. Each architecture has one process that
compiles (:mod:`codetta.tuning.compile_only`), so its tests belong to one worker of pytest-xdist.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
from kernel_jobs import job, library, loss_head, under_autocast

from codetta.backends.cuda.available import missing_package
from codetta.tuning.compile_only import Compiler, environment

if (missing := missing_package()) is not None:
    pytest.skip(f"compiling kernels: {missing}", allow_module_level=True)

pytestmark = pytest.mark.slow
on_hopper = pytest.mark.xdist_group("compile for sm_90a")
on_blackwell = pytest.mark.xdist_group("compile for sm_100a")

HOPPER = library("90")
BLACKWELL = library("100")
_FEW = {"stores": 16, "loads": 16}
#: What a kernel may have at most: "stores" (STL, spilled registers) and "loads" (LDL, their
#: reloads); and at least: "stages" of the A/B pipeline where they are fewer than three.
#: quack-kernels 0.6.5, nvidia-cutlass-dsl 4.7.0.
EXPECTED_HOPPER: dict[str, dict[str, int]] = {
    # At the limit of the registers, and the compiler does not repeat itself: 0, 1, 7 or 8 spills
    # of the same source, with a fixed seed of Python's hashes, too.
    "statistics, all": {"stores": 16, "loads": 16},
    # The fastest by sustained measurement (benchmarks/results/*/sustained_*.json), 1 to 9 % ahead
    # of the first configuration that spills nothing and has three stages.
    "middle forward nt 16384x8192x28672": _FEW,
    "middle forward nt 16384x4096x4096": _FEW,
    "shifted": _FEW,
    # In 192x128 ping-pong, 4 % ahead of 128x128, which spills nothing (sustained_sum24.json).
    "sum24 further": {"stores": 40, "loads": 40},
    "middle backward nn 16384x8192x57344": {"stages": 2},
    "entry backward nn 16384x4096x6144": {"stages": 2},
    # Not measured. 128x128 ping-pong spills a few where 256x128 cooperative spills none, and hides
    # the epilogue instead.
    "statistics, scaled": _FEW,
    "layernorm_statistics, ragged n": _FEW,
}
EXPECTED_BLACKWELL = {"layernorm_gelu_backward": {"stores": 44, "loads": 41}}


@pytest.fixture(scope="module")
def hopper(tmp_path_factory):
    compiler = Compiler("90", tmp_path_factory.mktemp("sm90"))
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def blackwell(tmp_path_factory):
    compiler = Compiler("100", tmp_path_factory.mktemp("sm100"))
    yield compiler
    compiler.close()


def fault(made: dict, target: str, *, stores: int = 0, loads: int = 0, stages: int = 3):
    """What is wrong with a compiled kernel, or None."""
    if "error" in made:
        return made["error"]
    if made["target"] != target:
        return f"compiled for {made['target']}"
    if not made["tensor_ops"]:
        return "no tensor cores"
    if made["stores"] > stores or made["loads"] > loads:
        return f"{made['stores']} spills and {made['loads']} reloads in {made['config']}"
    if made["stages"] < stages:
        return f"{made['stages']} A/B stages in {made['config']}"
    return None


@on_hopper
@pytest.mark.parametrize("name", HOPPER)
def test_a_kernel_for_hopper_neither_spills_nor_starves(hopper, name):
    made = hopper.compile(HOPPER[name])
    assert fault(made, "sm_90a", **EXPECTED_HOPPER.get(name, {})) is None, made
    assert made["packed"], made
    assert made["predicted_stages"] == made["stages"], made
    if "retried" in made:  # nothing of ours, but it should not become a habit
        warnings.warn(f"compiled by a fresh process only: {made['retried']}", stacklevel=1)


def test_the_kernel_of_a_kept_output_of_swiglu_is_among_them():
    """It stores dz alone: another source than where that output is computed, and stored, again."""
    for jobs in (HOPPER, BLACKWELL):
        (kept,) = (j.text for n, j in jobs.items() if " kept backward " in n)
        (again,) = (j.text for n, j in jobs.items() if n == "middle backward nn 16384x8192x2048")
        assert (kept.count("store "), again.count("store ")) == (1, 2)


@on_hopper
@pytest.mark.parametrize("name", under_autocast())
def test_an_fp32_residual_stream_neither_spills_nor_starves(hopper, name):
    made = hopper.compile(under_autocast()[name])
    assert fault(made, "sm_90a", **EXPECTED_HOPPER.get(name, {})) is None, made


@on_hopper
@pytest.mark.parametrize("name", loss_head())
def test_a_kernel_of_the_loss_head_neither_spills_nor_starves(hopper, name):
    made = hopper.compile(loss_head()[name])
    assert fault(made, "sm_90a", **EXPECTED_HOPPER.get(name, {})) is None, made


RAGGED = [("row_scale_lse_target", "n"), ("layernorm_statistics", "n"), ("rms_link_wgrad", "m")]


@on_hopper
@pytest.mark.parametrize("name, axis", RAGGED)
def test_masking_the_edges_spills_nothing(hopper, name, axis):
    made = hopper.compile(job(name, dtype="float16", **{axis: {"m": 1000, "n": 1528}[axis]}))
    expected = EXPECTED_HOPPER.get(f"{name}, ragged {axis}", {})
    assert fault(made, "sm_90a", **expected) is None, made


@on_hopper
def test_a_spilling_configuration_is_caught(hopper):
    """The packed epilogue in QuACK's own default tile, for which registers do not suffice."""
    made = hopper.compile(job("swiglu_backward", config=(128, 192, True)))
    assert made["stores"] > 100, made
    assert fault(made, "sm_90a") == (
        f"{made['stores']} spills and {made['loads']} reloads in 128x192 pp 2x1"
    )


@on_hopper
def test_a_starved_mainloop_is_caught(hopper):
    """Two loaded matrices in a large tile leave A and B two stages."""
    made = hopper.compile(job("rms_link_dgrad", config=(256, 128, False)))
    assert fault(made, "sm_90a") == "2 A/B stages in 256x128 coop 2x1"


def test_a_kernel_for_another_gpu_is_caught():
    good = {"target": "sm_90a", "tensor_ops": 16, "stores": 0, "loads": 0, "stages": 4}
    assert fault(good, "sm_90a") is None
    assert fault(good, "sm_100a") == "compiled for sm_90a"
    assert fault(good | {"tensor_ops": 0}, "sm_90a") == "no tensor cores"


def test_a_kernel_may_spill_what_is_on_record_and_no_more():
    made = {"target": "sm_90a", "tensor_ops": 16, "stages": 4, "config": "256x128 coop 2x1"}
    recorded = {"stores": 7, "loads": 6}
    for spills in ({"stores": 0, "loads": 0}, recorded):
        assert fault(made | spills, "sm_90a", **recorded) is None
    for spills in ({"stores": 8, "loads": 6}, {"stores": 7, "loads": 7}):
        assert fault(made | spills, "sm_90a", **recorded) is not None
    assert fault(made | {"stores": 1, "loads": 0}, "sm_90a") is not None


@on_blackwell
@pytest.mark.parametrize("name", BLACKWELL)
def test_a_kernel_for_blackwell_compiles(blackwell, name):
    made = blackwell.compile(BLACKWELL[name])
    assert fault(made, "sm_100a", **EXPECTED_BLACKWELL.get(name, {})) is None, made


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


@on_hopper
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
