"""fp8 kernels compiled for GPUs that are not here, in the chosen and in all measured tiles."""

from __future__ import annotations

import pytest

from codetta import programs
from codetta.backends.cuda.available import missing_package
from codetta.tuning.compile_only import Compiler, Job

if (missing := missing_package()) is not None:
    pytest.skip(f"compiling kernels: {missing}", allow_module_level=True)

pytestmark = pytest.mark.slow
on_hopper = pytest.mark.xdist_group("compile for sm_90a")
on_blackwell = pytest.mark.xdist_group("compile for sm_100a")

E4, E5 = "float8_e4m3fn", "float8_e5m2"
PROGRAMS = {
    "scaled": programs.fp8_scaled,
    "bias": programs.fp8_scaled_bias,
    "e4m3": programs.fp8_quantized("e4m3"),
    "e5m2": programs.fp8_quantized("e5m2"),
}
#: (program, dtypes of a and b, N): in the configuration the backend chooses.
CHOSEN = {
    "scaled": ("scaled", E4, E4, 1536),
    "scaled e4m3 x e5m2": ("scaled", E4, E5, 1536),
    "bias": ("bias", E4, E4, 1536),
    "e4m3": ("e4m3", E4, E4, 1536),
    "e4m3 ragged": ("e4m3", E4, E4, 1528),
    "e5m2": ("e5m2", E5, E4, 1536),
}
#: STL instructions by tile of what stores fp8 and a row maximum: quack-kernels 0.6.5. Others are
#: 0 in 128x128 ping-pong and 256x160, 30 in 192x128 ping-pong; what stores bf16 alone has none.
SPILLS = {(128, 256, False): 0, (128, 192, True): 40}


def job(program: str, a: str, b: str, n: int, **changes) -> Job:
    return Job(PROGRAMS[program].text, 1024, n, 512, "nt", dtype=a, dtype_b=b, **changes)


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


@on_hopper
@pytest.mark.parametrize("name", CHOSEN)
def test_the_chosen_configuration_neither_spills_nor_starves(hopper, name):
    made = hopper.compile(job(*CHOSEN[name]))
    assert made.get("error") is None, made
    assert (made["stores"], made["loads"], made["target"]) == (0, 0, "sm_90a"), made
    assert made["tensor_ops"] > 0
    assert made["stages"] == made["predicted_stages"] >= 4


@on_hopper
@pytest.mark.parametrize("tile", SPILLS, ids=str)
def test_spills_decide_the_tile_of_an_fp8_store_with_a_maximum(hopper, tile):
    made = hopper.compile(job("e4m3", E4, E4, 1536, config=tile))
    assert made.get("error") is None, made
    assert made["stores"] == SPILLS[tile], made


@on_hopper
def test_adding_up_outside_of_the_tensor_cores_takes_the_epilogues_registers(hopper):
    made = hopper.compile(job("scaled", E4, E4, 1536, config=(128, 128, True), fp8="full"))
    fast = hopper.compile(job("scaled", E4, E4, 1536, config=(128, 128, True)))
    assert made.get("error") is None, made
    assert (made["stores"] > 50, fast["stores"]) == (True, 0)


@on_blackwell
@pytest.mark.parametrize("name", ["scaled", "e4m3"])
def test_equal_dtypes_compile_for_blackwell(blackwell, name):
    made = blackwell.compile(job(name, E4, E4, 1536, config=(256, 128, False)))
    assert made.get("error") is None, made
    assert made["tensor_ops"] > 0 and made["target"] == "sm_100a"


@on_blackwell
def test_mixed_dtypes_do_not(blackwell):
    made = blackwell.compile(job("scaled", E5, E4, 1536, config=(256, 128, False)))
    assert "error" in made
