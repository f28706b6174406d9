"""Which cut suits the generated kernels of a model's step: times by rows and warps of a block.

    python benchmarks/tune_pointwise.py --out results --model qwen3-0.6b
    python benchmarks/tune_pointwise.py --out results --model llama-1b --least 64

Programs without a product run as kernels generated for Triton, whose blocks are cut by a rule
(src/codetta/backends/cuda/triton_stages.py, which says what this found). Here each such program of
a step that moves --least MB or more runs, on the step's own tensors, in the rule's cut and in
others near it, in blocks back to back as in tune_sustained.py. Results of all cuts are compared.
The step is that of a case of llama.py with two of its layers. One JSON file per model; nothing
becomes a default. Needs a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import llama
import llama_models
import torch
from measure import environment, lines, relative, write_json
from torch import Tensor

from codetta.backends.cuda import pointwise
from codetta.backends.cuda.triton_kernels import DTYPES, kernel
from codetta.backends.cuda.triton_stages import cut, stages
from codetta.backends.cuda.triton_task import Cut, Task
from codetta.language.meaning import operand_storage
from codetta.language.program import Program
from codetta.tuning.timing import Measure, SustainedTimer

ROUNDS = 3
#: Two cuts add up in another order; more than this is another result.
SAME = 1e-2


@dataclass(frozen=True)
class Call:
    """One launch: a program without an accumulator and its tensors."""

    program: Program
    operands: tuple[Tensor, ...]
    m: int
    n: int
    dtypes: tuple[torch.dtype, torch.dtype]
    tile: tuple[int, int] | None
    raw: bool

    @property
    def task(self) -> Task:
        """Of its first kernel; a second one only combines what that leaves."""
        operand, compute = self.dtypes
        names = DTYPES[operand_storage(operand)], DTYPES[compute]
        return stages(self.program, *names, self.raw).first


@contextmanager
def recording(found: dict[str, Call]) -> Iterator[None]:
    """Programs as they are launched, each once."""
    run = pointwise.run

    def noted(
        program: Program, operands: Any, m: int, n: int, operand: Any, compute: Any,
        tile: Any, raw: bool,
    ) -> list[Tensor]:  # fmt: skip
        given = tuple(x.detach() for x in operands)
        found.setdefault(program.text, Call(program, given, m, n, (operand, compute), tile, raw))
        return run(program, operands, m, n, operand, compute, tile, raw)

    with mock.patch.object(pointwise, "run", noted):
        yield


def calls(model: str) -> list[Call]:
    """Of one step of a case of llama.py, with two of its layers."""
    step = llama.Step(llama_models.two_layers(model), "step", torch.bfloat16)
    found: dict[str, Call] = {}
    with recording(found):
        step.of(llama_models.coda_without_logits(step.model))()
    step.clear()
    return list(found.values())


def cuts(task: Task, n: int, tile: tuple[int, int] | None) -> list[Cut]:
    """The rule's, which comes first, and others of the same chunks and columns."""
    base = cut(task, n, tile)
    found = [base]
    for rows in (base.rows * 2, base.rows, base.rows // 2, base.rows // 4, base.rows // 8):
        for warps in (2, 4, 8):
            # Where the loop runs over columns a chunk is one block of rows. Otherwise a chunk of
            # one block stays one, unless partials are asked for, one per tile of the language.
            asked = task.raw and bool(task.folded)
            one = base.by_columns or (base.chunk_rows == base.rows and not asked)
            chunk = rows if one else base.chunk_rows
            made = replace(base, rows=rows, warps=warps, chunk_rows=chunk)
            if rows and chunk % rows == 0 and made not in found:
                found.append(made)
    return found


def moved(operands: tuple[Tensor, ...], made: list[Tensor]) -> int:
    """Bytes of all that is read and written, each once."""
    return sum(x.numel() * x.element_size() for x in (*operands, *made))


def times(call: Call, measure: Measure) -> dict[str, Any]:
    """Milliseconds and GB/s of each cut, fastest first."""
    task, runs, bad = call.task, {}, {}
    first: list[Tensor] = []
    made = {f"{c.rows} rows, {c.warps} warps": c for c in cuts(task, call.n, call.tile)}
    for name, shape in made.items():
        run = _launch(call, task, shape)
        try:
            got = run()
        except Exception as error:  # too many registers or too much shared memory
            bad[name] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        first = first or got
        if any(not relative(a, b) <= SAME for a, b in zip(got, first, strict=True)):
            bad[name] = "another result"
            continue
        runs[name] = run
    taken = measure(runs, ROUNDS)
    size = moved(call.operands, first)
    rows = [
        {"cut": asdict(made[n]), "name": n, "ms": t.median, "gb_s": size / t.median / 1e6}
        for n, t in taken.items()
    ]
    return {
        "program": call.program.text, "m": call.m, "n": call.n, "raw": call.raw, "bytes": size,
        "rule": next(iter(made)), "cuts": sorted(rows, key=lambda r: r["ms"]), "failed": bad,
    }  # fmt: skip


def _launch(call: Call, task: Task, shape: Cut) -> Callable[[], list[Tensor]]:
    made = kernel(task, shape)
    return lambda: made.run(call.operands, call.m, call.n, call.program.name)


def table(record: dict[str, Any]) -> str:
    rows = [("", "ms", "GB/s")]
    for r in record["cuts"]:
        mark = " (rule)" if r["name"] == record["rule"] else ""
        rows.append((r["name"] + mark, f"{r['ms']:.4f}", f"{r['gb_s']:.0f}"))
    name = record["program"].split("(")[0].removeprefix("program ")
    return f"{name}, {record['m']} x {record['n']}, {record['bytes'] / 1e6:.0f} MB\n" + lines(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", required=True, choices=list(llama_models.CASES))
    parser.add_argument("--least", type=float, default=32.0, help="MB that a program moves")
    args = parser.parse_args(arguments)
    timer = SustainedTimer(torch.device("cuda", torch.cuda.current_device()))
    data: dict[str, Any] = {"model": args.model, "environment": environment(), "programs": []}
    for call in calls(args.model):
        if moved(call.operands, []) < args.least * 1e6:
            continue
        with torch.no_grad():
            data["programs"].append(times(call, timer))
        print(table(data["programs"][-1]), flush=True)
        write_json(args.out / f"pointwise_{args.model}.json", data)


if __name__ == "__main__":
    main()
