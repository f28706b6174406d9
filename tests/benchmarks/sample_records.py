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


def model_record(coda=100.0, date="2000-01-02 00:00:00", part="step", **changes):
    """Of llama.py; Liger, compiled, is as one without gradients was recorded when it was timed."""
    close, off = {"first norm": 0.02, "first q": 0.04}, {"first norm": 1.0, "first q": 1.0}
    times = {"eager": 150.0, "CODA": coda, "Liger, compiled": 90.0}
    record = {
        "case": {
            "name": "llama-1b", "kind": "llama", "batch": 2, "seq": 8192,
            "sizes": {
                "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
            },
        },
        "part": part, "steps_per_sample": 2, "rounds": 5,
        "times_ms": {n: [t] * 5 for n, t in times.items()},
        "first_step_s": {"eager": 1.0, "CODA": 9.0, "Liger, compiled": 8.0},
        "rewriter_s": {"CODA": 0.5},
        "peak_bytes": {"eager": 6 << 30, "CODA": 2 << 30, "Liger, compiled": 3 << 30},
        "relative_difference_to_eager": {
            "eager": {"first norm": 0.0, "first q": 0.01, "output": 0.0},
            "CODA": close | {"output": 2e-6},
            "Liger, compiled": off | {"output": 1e-6},
        },
        "failed": {"Liger": "AcceleratorError: an illegal memory access\n" + 40 * "said more "},
        "environment": ENVIRONMENT | {"date": date, "transformers": "5.0"},
    }  # fmt: skip
    return record | changes


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
