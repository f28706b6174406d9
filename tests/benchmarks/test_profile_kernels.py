"""benchmarks/profile_kernels.py: what it profiles and how it reads ncu. The CSV is synthetic."""

import profile_kernels as profile
import pytest

from codetta.backends.cuda.forms import ELEMENT, PACKED
from codetta.backends.cuda.lowering import mode_of


def synthetic(kernels, unit="ns"):
    """Text in the form of ``ncu --csv --page raw``, written by hand; not from a GPU."""
    stall = "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio"
    wanted = ("time us", "tensor pipe %", "tensor pipe %", "issue slots %", "registers")
    last = {"tensor pipe %": iter((-1, 0))}  # two names of one fact: the first counts
    names = [profile.METRICS[n][next(last[n]) if n in last else 0] for n in wanted] + [stall]
    header = ["ID", "Kernel Name", *names]
    rows = [header, ["", "", unit, "%", "%", "%", "register/thread", "inst"], *kernels]
    lines = [",".join(f'"{x}"' for x in row) for row in rows]
    return "\n".join(["==PROF== Connected to process 1", "==PROF== Disconnected", *lines]) + "\n"


SMALL = ["0", "finalize", "4,000", "0", "0", "3.5", "32", "0.1"]
LARGE = ["1", "gemm", "1,234,000", "71.5", "80.25", "44", "168", "2.75"]


def test_the_longest_kernel_is_read_with_its_units():
    for rows in ([SMALL, LARGE], [LARGE, SMALL]):
        found = profile.parse(synthetic(rows))
        assert found["kernel"] == "gemm" and found["time us"] == pytest.approx(1234.0)
        assert found["tensor pipe %"] == 80.25
        assert found["issue slots %"] == 44 and found["registers"] == 168
        assert found["stalls"] == {"gmma": 2.75} and "DRAM %" not in found
    assert profile.parse(synthetic([LARGE], "ms"))["time us"] == pytest.approx(1234000 * 1e3)


def test_the_reading_sets_the_plain_product_beside_it():
    fused, plain = (profile.parse(synthetic([row])) for row in (LARGE, SMALL))
    text = profile.reading(fused, plain)
    (line,) = (x for x in text.splitlines() if "issue slots" in x)
    assert "44.0" in line and "plain" in line and "3.5" in line
    assert "gmma 2.75" in text and "DRAM" not in text


@pytest.mark.parametrize("text", ["", "==ERROR== ERR_NVGPUCTRPERM\n", synthetic([])])
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(ValueError):
        profile.parse(text)


def test_the_kernels_to_profile_are_those_of_the_layer():
    swiglu, output = (profile.problem(k, "d2048") for k in profile.KERNELS)
    assert mode_of(swiglu.program) == PACKED and (swiglu.m, swiglu.n, swiglu.k) == (
        16384,
        8192,
        2048,
    )
    assert mode_of(output.program) == ELEMENT and (output.n, output.k) == (2048, 2048)


def test_a_recorded_file_is_read_without_a_gpu(tmp_path, capsys):
    file = tmp_path / "one.csv"
    file.write_text(synthetic([SMALL, LARGE]))
    profile.main(["--csv", str(file)])
    assert "tensor pipe %" in capsys.readouterr().out
