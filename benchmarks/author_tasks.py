"""Times of one program for each task of the author tools: which reach their plain GEMM, which not.

    python benchmarks/author_tasks.py --out benchmarks/results/DAY-GPU --budget 540
    python benchmarks/author_tasks.py --out benchmarks/results/DAY-GPU --table

Programs are the files tests/author/solutions/TASK.py. The first line times what has no result in
the folder yet, so it can be run again until all are there; kernels are compiled beforehand, by all
cores. Each task is timed as ``codetta bench`` does it, and outputs are compared with the reference
in fp64 as they are timed. Without a GPU it writes estimates that say so. The second line prints
the results as a table.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from measure import environment, free, lines, write_json

import codetta
from codetta.author.bench import bench_stages
from codetta.author.candidate import load_candidate
from codetta.author.contenders import on_meta
from codetta.author.surroundings import no_gpu
from codetta.author.task import find, names
from codetta.language.program import Program

SOLUTIONS = Path(__file__).resolve().parents[1] / "tests" / "author" / "solutions"
NEEDED_S = 40  # for one task; torch.compile takes most of it


def programs(wanted: list[str]) -> dict[str, Program]:
    return {name: load_candidate(SOLUTIONS / f"{name}.py").program for name in wanted}


def compile_beforehand(found: dict[str, Program]) -> str:
    """The kernels of all tasks at all sizes, in parallel."""
    from codetta.tuning.calls import recorded
    from codetta.tuning.precompile import compile_calls

    gemm = codetta.gemm  # resolved here, which registers the operators that are recorded

    def run() -> None:
        for name, program in found.items():
            for w in find(name).benchmark:
                a, b, operands = on_meta(find(name), w)
                gemm(a, b, program, **operands)

    return str(compile_calls(recorded(run), torch.cuda.current_device()))


def timed(name: str, program: Program, seed: int) -> dict[str, Any]:
    """The record of one task."""
    begun = time.monotonic()
    stages = bench_stages(find(name), program, seed)
    return {
        "task": name, "program": program.text, "seed": seed, "environment": environment(),
        "seconds": round(time.monotonic() - begun, 1),
        "stages": [json.loads(s.model_dump_json()) for s in stages],
    }  # fmt: skip


def table(folder: Path) -> str:
    """One row per task and size: milliseconds, and the candidate's time over the others'."""
    head = ["task", "size", "ms", "over plain", "over compile", "over eager", "floor ms", "verdict"]
    rows = [head]
    for file in sorted(folder.glob("author_*.json")):
        data = json.loads(file.read_text())
        for stage in data["stages"]:
            f = stage["facts"]
            ratios = [f"{f[n]:.3f}" if n in f else "" for n in
                      ("over_plain", "over_compile", "over_eager")]  # fmt: skip
            rows.append([data["task"], stage["name"], f"{f['candidate_ms']:.4f}", *ratios,
                         f"{f['floor_ms']:.4f}", f["verdict"]])  # fmt: skip
    return lines(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", action="append", help="only this one; may be repeated")
    parser.add_argument("--budget", type=float, default=540, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print what is there")
    args = parser.parse_args(arguments)
    end = time.monotonic() + args.budget
    if not args.table:
        files = {name: args.out / f"author_{name}.json" for name in args.task or names()}
        left = [name for name, file in files.items() if not file.is_file()]
        found = programs(left)
        if not no_gpu():
            print(compile_beforehand(found), flush=True)
        for i, (name, program) in enumerate(found.items()):
            if i and time.monotonic() + NEEDED_S > end:
                print(f"{len(found) - i} tasks are left: run it again", flush=True)
                break
            try:
                write_json(files[name], timed(name, program, args.seed))
            except Exception as error:  # the others are worth having
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
            free()
            torch._dynamo.reset()
    print(table(args.out))


if __name__ == "__main__":
    main()
