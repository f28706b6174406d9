"""Records as the benchmarks write them, with numbers that are easy to check."""

from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

ENVIRONMENT = {
    "gpu": "Sample GPU", "state": "1 MHz", "state_after": "2 MHz", "date": "2000-01-02 00:00:00",
    "commit": "abc", "torch": "2.0",
}  # fmt: skip
SHAPE = {"name": "d2048", "d": 2048, "f": 8192, "heads": 16, "kv_heads": 16}


def layer_record(coda_both=10.5, date="2000-01-02 00:00:00"):
    def times(forward, both):
        return {"forward": [forward] * 5, "both": [both] * 5}

    return {
        "shape": SHAPE, "tokens": 16384, "steps_per_sample": 3, "rounds": 5,
        "times_ms": {
            "floor": times(3.0, 10.0), "torch.compile": times(3.3, 12.6),
            "paper form": times(3.2, 11.55), "coda": times(3.15, coda_both),
        },
        "peak_bytes": {"torch.compile": 3 << 30, "coda": 2 << 30},
        "relative_difference_to_eager": {"coda": {"x": 0.002, "d_x": 0.004}},
        "notes": {"liger": "failed: ModuleNotFoundError"},
        "environment": ENVIRONMENT | {"date": date},
    }  # fmt: skip


def kernels_record():
    gemm = {"program": "p", "mnk": [16384, 2048, 2048], "majors": ["row", "column"], "notes": {}}
    slow = {"coda": [2.4] * 5, "cublas": [2.1] * 5, "quack": [2.0] * 5}
    good = {"coda": [1.05] * 5, "cublas": [1.0] * 5, "quack": [1.1] * 5}
    move = {"kind": "codetta::prepare", "name": "fold", "phase": "forward", "notes": {}}
    return {
        "shape": SHAPE, "tokens": 16384, "environment": ENVIRONMENT, "copy_bytes_per_s": 4e12,
        "gemms": [
            gemm | {"role": "down dgrad", "times_ms": slow},
            gemm | {"role": "output projection", "times_ms": good},
        ],
        "memory": [move | {"bytes": 8_000_000, "times_ms": {"coda": [0.003] * 5}}],
    }  # fmt: skip


def cold_record():
    run = {
        "mode": "cold", "to_first_step_s": 61.0, "stages_s": {"codetta": 8.0, "first step": 53.0},
        "kernel_builds": {"count": 27, "seconds": 50.0}, "tokens": 4096,
        "environment": ENVIRONMENT,
    }  # fmt: skip
    return {"runs": [run, run | {"mode": "warm", "to_first_step_s": 9.5}]}
