"""Every ready program and the decoder's kernels on a Hopper GPU, against fp64.

    python benchmarks/check_cuda.py --out results/check.json      # all of it, a few minutes
    python benchmarks/check_cuda.py --only swiglu --budget 120    # names that contain 'swiglu'
    python benchmarks/check_cuda.py --time                        # and the kernels' times

Checked: the catalog's GEMM programs on aligned, ragged, tiny and strided operands; its programs
without accumulator; the schedules of a decoder layer, forward and backward; accumulation in place;
a call under CUDA graph capture; that a new M compiles nothing. The verdict is the error budget
‖out - ref64‖ <= 2 ‖theirs - ref64‖ + 2 eps ‖sum of absolute addends‖, where ``theirs`` rounds every
operation as eager PyTorch does (for schedules: the reference backend in the same dtype, whose error
is smaller). Outputs of fewer than 32 numbers are judged over 16 draws of inputs together.

Kernels are compiled in QuACK's pool of processes: an item whose kernel is not ready goes to the
end of the queue. A failing item is a line in the table, and the exit status.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("QUACK_COMPILE_WORKERS", str(len(os.sched_getaffinity(0))))

import torch
from cuda_items import DEVICE, Item, all_items, on_gpu
from helpers.cases import inputs

import codetta
from codetta import programs
from codetta.backends.cuda.launch import CUDA, explain


@dataclass
class Verdict:
    name: str
    status: str  # 'ok', 'wrong', 'error', 'skipped'
    worst: float = 0.0  # largest error / allowed
    seconds: float = 0.0
    note: str = ""


def check(items: list[Item], budget: float) -> Iterator[Verdict]:
    """Verdicts as they come; what the budget does not reach is 'skipped'."""
    from quack.cache.async_compile import CompilePending, pool_scope, suppress_pool

    start, queue = time.monotonic(), deque(items)
    waiting = 0  # items in a row that found their kernel still compiling
    with pool_scope():
        while queue:
            name, function = queue.popleft()
            begun = time.monotonic()
            if begun - start > budget:
                yield Verdict(name, "skipped")
                continue
            try:
                verdict = judged(name, function)
            except CompilePending:
                queue.append((name, function))
                waiting += 1
                if waiting > len(queue):
                    waiting = 0
                    time.sleep(0.3)
                continue
            waiting = 0
            if verdict.status == "error" and "ompil" in verdict.note:  # once more, in this process
                with suppress_pool():
                    verdict = judged(name, function)
            yield verdict


def judged(name: str, function: Callable[[], tuple[float, str]]) -> Verdict:
    begun = time.monotonic()
    try:
        value, note = function()
        torch.cuda.synchronize()
    except AssertionError as error:
        return Verdict(name, "wrong", float("inf"), time.monotonic() - begun, str(error)[:160])
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        note = f"{type(error).__name__}: {str(error)[:160]} ({place})"
        return Verdict(name, "error", float("inf"), time.monotonic() - begun, note)
    status = "ok" if value <= 1 else "wrong"
    return Verdict(name, status, value, time.monotonic() - begun, note)


def times(only: str) -> Iterator[tuple[str, float, float, str]]:
    """(program, its ms, ms of the plain product, configuration), M 16384, N 4096, K 2048, bf16."""
    from triton.testing import do_bench

    m, n, k = 16384, 4096, 2048
    for name, entry in programs.catalog().items():
        program = entry.program
        if not program.has_acc or only not in name or explain(program) is not None:
            continue
        a, b, operands = inputs(program, (m,), n // program.granule, k, torch.bfloat16)
        a, b = a.to(DEVICE), b.to(DEVICE).t().contiguous().t()
        operands = {o: on_gpu(x) for o, x in operands.items()}
        with codetta.use_backend("cuda"), torch.no_grad():
            ours = do_bench(lambda: codetta.gemm(a, b, program, **operands), return_mode="median")  # noqa: B023
            config = next(
                str(c.config) for key, c in CUDA._calls.items() if key[0] == program and c
            )
        yield name, ours, do_bench(lambda: a @ b, return_mode="median"), config  # noqa: B023


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which to stop")
    parser.add_argument("--out", type=Path, help="write the verdicts as JSON")
    parser.add_argument("--time", action="store_true", help="also time the catalog's programs")
    parser.add_argument("--all", action="store_true", help="print every line, not only failures")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    items = [x for x in all_items() if arguments.only in x[0]]
    verdicts: list[Verdict] = []
    for v in check(items, arguments.budget):
        verdicts.append(v)
        if arguments.all or v.status in ("wrong", "error"):
            print(f"{v.status:7} {v.worst:8.3f} {v.seconds:6.1f}s {v.name}  {v.note}", flush=True)
    counts = {s: sum(v.status == s for v in verdicts) for s in ("ok", "wrong", "error", "skipped")}
    close = sorted((v for v in verdicts if v.status == "ok"), key=lambda v: -v.worst)[:5]
    print(counts, "closest to the budget:", ", ".join(f"{v.name} {v.worst:.2f}" for v in close))
    notes = sorted({f"{v.name.split()[0]}: {v.note}" for v in verdicts if v.note.startswith("unf")})
    print("\n".join(notes))
    timed = [] if not arguments.time else list(times(arguments.only))
    for name, ours, plain, config in timed:
        print(
            f"{name:28} {ours:7.3f} ms, plain {plain:7.3f} ms, ratio {ours / plain:5.2f}  {config}"
        )
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "gpu": torch.cuda.get_device_name(),
            "verdicts": list(map(asdict, verdicts)),
            "times": timed,
        }
        arguments.out.write_text(json.dumps(record, indent=1))
    return int(counts["wrong"] + counts["error"] > 0)


if __name__ == "__main__":
    sys.exit(main())
