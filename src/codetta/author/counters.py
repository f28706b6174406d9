"""Performance counters of one kernel, read by Nsight Compute (``ncu``)."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Short name, and the metrics of ncu that say it: the first that a report has is taken, since their
#: names differ between GPUs and versions.
METRICS = {
    "time us": ("gpu__time_duration.sum",),
    "tensor pipe %": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    ),
    "issue slots %": (
        "sm__inst_issued.avg.pct_of_peak_sustained_active",
        "sm__instruction_throughput.avg.pct_of_peak_sustained_active",
    ),
    "xu pipe %": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",),
    "shared memory %": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
        "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
        "l1tex__throughput.avg.pct_of_peak_sustained_active",
    ),
    "L2 %": (
        "lts__throughput.avg.pct_of_peak_sustained_elapsed",
        "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    ),
    "DRAM %": (
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "DRAM read bytes": ("dram__bytes_read.sum",),
    "DRAM written bytes": ("dram__bytes_write.sum",),
    "local stores": (
        "smsp__sass_inst_executed_op_local_st.sum",
        "sass__inst_executed_local_stores",
        "smsp__inst_executed_op_local_st.sum",
    ),
    "instructions": ("smsp__inst_executed.sum", "sm__inst_executed.sum"),
    "registers": ("launch__registers_per_thread",),
    "occupancy %": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
}
#: Why warps did not issue, per issued instruction.
STALL = re.compile(
    r"smsp__average_warps?_(?:latency_)?issue_stalled_(\w+?)(?:_per_issue_active)?\.ratio"
)
#: To microseconds, and to bytes.
_SCALES = {
    "ns": 1e-3, "nsecond": 1e-3, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6,
    "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9,
}  # fmt: skip
# the clocks are left as they are: ncu would fix them otherwise
_CSV = (
    "--csv",
    "--page",
    "raw",
    "--profile-from-start",
    "off",
    "--set",
    "full",
    "--clock-control",
    "none",
)


def find_ncu() -> str | None:
    """The path of ncu, or None."""
    usual = Path("/usr/local/cuda/bin/ncu")
    return shutil.which("ncu") or (str(usual) if usual.is_file() else None)


def run_ncu(command: Sequence[str], limit_s: float, given: str | None = None) -> str:
    """What ncu prints as CSV about the launches that ``command`` marks with cudaProfilerStart.

    Args:
        given: standard input of the command.

    Raises:
        RuntimeError: ncu is missing, failed (often for want of permission to read counters), or
            took longer than ``limit_s`` seconds.
    """
    ncu = find_ncu()
    if ncu is None:
        raise RuntimeError("ncu is not on PATH: install Nsight Compute, which comes with CUDA")
    try:
        done = subprocess.run(
            [ncu, *_CSV, *command], capture_output=True, text=True, timeout=limit_s, input=given
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"ncu took more than {limit_s:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"ncu failed:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    return done.stdout


def parse(text: str) -> dict[str, Any]:
    """Metrics of the kernel that took longest, by their short names, and the stalls.

    ``ncu --csv --page raw`` prints lines of its own, then a header, a row of units and one row per
    kernel. A metric that this GPU or this version lacks is left out.

    Raises:
        ValueError: the text is none of that, or has no kernel.
    """
    lines = text.splitlines()
    start = next((i for i, x in enumerate(lines) if x.startswith('"ID"')), None)
    if start is None:
        raise ValueError('no line begins with "ID": this is not what ncu --csv --page raw prints')
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    units, kernels = rows[0], rows[1:]
    if not kernels:
        raise ValueError("ncu saw no kernel")
    duration = METRICS["time us"][0]
    longest = max(kernels, key=lambda row: _number(row.get(duration)) or 0.0)
    found: dict[str, Any] = {"kernel": longest.get("Kernel Name", "")}
    for name, candidates in METRICS.items():
        for metric in candidates:
            value = _number(longest.get(metric))
            if value is not None:
                found[name] = value * _SCALES.get(units.get(metric, ""), 1.0)
                break
    stalls = ((STALL.fullmatch(metric or ""), _number(x)) for metric, x in longest.items())
    found["stalls"] = {m[1]: x for m, x in stalls if m is not None and x is not None}
    return found


def _number(text: Any) -> float | None:
    try:
        return float(str(text or "").replace(",", ""))
    except ValueError:
        return None
