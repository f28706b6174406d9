"""Search configurations again where it counts: at the clock that a long run of each leaves.

    python benchmarks/tune_sustained.py --out results --shape d8192 --shape d4096 --budget 200
    python benchmarks/tune_sustained.py --out results --loss d2048_v128256
    python benchmarks/tune_sustained.py --out results --model qwen3-0.6b   # a case of llama.py
    python benchmarks/tune_sustained.py --out results --task mish          # looked at, no default
    python benchmarks/tune_sustained.py --out results --write-defaults     # no GPU needed

An H200 under large GEMMs is limited by power, not by its clock: a tile that moves fewer bytes
through shared memory lets the clock rise. Timings that interleave single launches, as those of
tune_shapes.py do, cannot see that: all candidates share one clock. Here each candidate runs in
blocks, launches back to back; what runs while the card settles is not counted.

Candidates of a layer's kernels are those that tune_shapes.py found within a few percent of its
winner, the best of each tile. Those of the loss head and of a model (recorded from a step, of the
model with two of its layers) are a fixed list. One JSON file per shape; finished kernels are kept,
so it can be run again. ``--write-defaults`` puts the winners into the package's data file, in place
of what it holds for the same kernels; not those of ``--task``, the programs of author_tasks.py at
their benchmark sizes: one default serves all epilogues of a family.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from layer_model import SHAPES, TOKENS, Shape
from measure import environment, write_json
from tune_shapes import problems

from codetta.backends.cuda import quack, shipped
from codetta.backends.cuda.config_cache import canonical
from codetta.backends.cuda.configs import Configuration, choose, family, illegal, layout_of
from codetta.backends.cuda.forms import PACKED
from codetta.backends.cuda.lowering import lower
from codetta.tuning.search import Candidate, prepared
from codetta.tuning.space import DTYPES, Problem, arrays
from codetta.tuning.timing import Measure, SustainedTimer
from codetta.tuning.tune import kernels_of
from codetta.tuning.workers import Job, compile_all

#: Beside the layers of layer.py, those of llama.py whose q, k, v have other sizes.
ALL_SHAPES = [*SHAPES, Shape("llama-1b", 2048, 8192, 32, 8)]
RESULTS = Path(__file__).with_name("results")
ROUNDS = 3
#: How names of tasks begin, and their files, which --write-defaults does not read.
TASK = "tiles_"
#: Of a record's winner: what is slower than this is no candidate.
NEAR = 1.06
MOST = 6
#: For kernels that are on no record.
USUAL = (
    Configuration(128, 256, False, 2, 1), Configuration(256, 128, False, 2, 1),
    Configuration(128, 192, True, 2, 1), Configuration(192, 128, True, 1, 2),
    Configuration(128, 128, True, 1, 2), Configuration(256, 192, False, 2, 1),
    Configuration(128, 224, False, 2, 1), Configuration(256, 128, False, 1, 2),
)  # fmt: skip
#: For epilogues of one task, which may need more registers or arithmetic than most.
VARIED = (
    *USUAL, Configuration(128, 128, True, 2, 1), Configuration(128, 160, True, 2, 1),
    Configuration(128, 96, True, 2, 1), Configuration(64, 256, False, 2, 1),
    Configuration(64, 128, True, 2, 1),
)  # fmt: skip
#: Epilogues on pairs fit the registers up to 144 columns; tune_shapes.py tried 128 and 160.
BETWEEN = (Configuration(128, 144, True, 1, 2), Configuration(128, 144, True, 2, 1))


# --------------------------------------------------------------------------------- candidates
def records() -> dict[tuple[Any, ...], dict[str, Any]]:
    """What tune_shapes.py measured, by program, M, N, K and layout."""
    found = {}
    for file in sorted(RESULTS.glob("*/tune_*.json")):
        for kernel in json.loads(file.read_text()).get("kernels", {}).values():
            if "digest" in kernel:
                found[tuple(kernel[x] for x in ("digest", "m", "n", "k", "layout"))] = kernel
    return found


def near(record: Mapping[str, Any]) -> list[Configuration]:
    """The best configuration of each tile that came close to the winner, the fastest tiles."""
    best = record["best"]["median_ms"]
    found: dict[tuple[Any, ...], tuple[float, Configuration]] = {}
    for candidate in record["candidates"]:
        config = Configuration.of(candidate["config"], "record")
        ms = candidate.get("median_ms")
        if config is None or ms is None or ms > NEAR * best or candidate["spills"]:
            continue
        key = config.tile, config.pingpong, config.epi_n
        if key not in found or ms < found[key][0]:
            found[key] = ms, config
    return [config for _, config in sorted(found.values(), key=lambda x: x[0])][:MOST]


def candidates(
    problem: Problem,
    known: Mapping[tuple[Any, ...], Mapping[str, Any]],
    usual: Sequence[Configuration] = USUAL,
) -> list[Configuration]:
    """What the kernel takes now, which comes first, and what might be better."""
    lowered = lower(problem.program, problem.operand)
    p = problem
    record = known.get((p.program.digest, p.m, p.n, p.k, p.layout))
    found = near(record) if record is not None else list(usual)
    if lowered.mode == PACKED:
        found += BETWEEN
    now = choose(lowered, p.m, p.n, p.k, p.layout)
    every = [*([now] if now is not None else []), *found]
    different: dict[str, Configuration] = {}
    for c in every:
        if illegal(lowered, c) is None:
            different.setdefault(json.dumps(c.data()), c)
    return list(different.values())


def loss_problems(shape: str) -> dict[str, Problem]:
    """The kernels of one step of the loss head, as it runs within 1 GiB and within 4."""
    import loss
    import loss_contenders

    sizes = next(s for s in loss_contenders.SHAPES if s.name == shape)
    head = loss_contenders.Head.random(sizes, TOKENS, torch.bfloat16)
    found: dict[str, Problem] = {}
    for make in (loss_contenders.coda, loss_contenders.coda_forward):
        step = loss.run(head, make(head), "both")
        found |= {p.name + f" {p.program.digest[:6]}": p for p in kernels_of(step, (), {})}
    head.clear()
    return found


def model_problems(name: str) -> dict[str, Problem]:
    """The kernels of a step of a whole model, its loss within 1 GiB and within 4; two layers of it,
    since kernels of the others are the same."""
    import llama
    import llama_models

    step = llama.Step(llama_models.two_layers(name), "step", torch.bfloat16)
    found: dict[str, Problem] = {}
    for make in (llama_models.coda_without_logits, llama_models.coda_with_4_gib):
        run = step.of(make(step.model))
        found |= {f"{p.name} {p.program.digest[:6]}": p for p in kernels_of(run, (), {})}
    step.clear()
    return found


def task_problems(name: str) -> dict[str, Problem]:
    """The product of a task's program, at its benchmark sizes."""
    from author_tasks import programs

    from codetta.author.contenders import on_meta
    from codetta.author.task import find

    (program,), found = programs([name]).values(), {}
    names = {dtype: short for short, dtype in DTYPES.items()}
    for w in find(name).benchmark:
        a, b, _ = on_meta(find(name), w)
        found[f"{w.m}x{w.n}x{w.k}"] = Problem(
            canonical(program), w.m, w.n, w.k, layout_of(a, b), names[a.dtype]
        )
    return found


def selected(found: Mapping[str, Problem], only: str) -> dict[str, Problem]:
    """Those whose 'MxNxK layout family' contains ``only``, as in '4096x3328 tn element load1'."""
    return {
        name: p
        for name, p in found.items()
        if only in f"{p.m}x{p.n}x{p.k} {p.layout} {family(lower(p.program, p.operand))}"
    }


# ------------------------------------------------------------------------------------ measuring
def kernel_record(
    problem: Problem, statics: Mapping[str, Any], configs: Sequence[Configuration], measure: Measure
) -> dict[str, Any] | None:
    """Sustained times of all candidates and of the plain products, fastest candidate first."""
    given = arrays(problem, "cuda")
    a, b, _ = given
    made = [Candidate(c, statics[Job(problem, c).key]) for c in configs]
    runs = prepared(problem, given, made)
    named = {str(i): c for i, c in enumerate(made) if id(c) in runs}
    work: dict[str, Callable[[], Any]] = {n: runs[id(c)] for n, c in named.items()}
    times = measure(work | {"cublas": lambda: a @ b}, ROUNDS)
    for name, candidate in named.items():
        candidate.times = times[name]
    ranked = sorted(named.values(), key=lambda c: c.times.median if c.times else 0.0)
    if not ranked or ranked[0].times is None:
        return None
    best, cublas = ranked[0], times["cublas"]
    assert best.times is not None
    return {
        "family": family(lower(problem.program, problem.operand)),
        "program": problem.program.text, "digest": problem.program.digest,
        "m": problem.m, "n": problem.n, "k": problem.k, "layout": problem.layout,
        "operand": problem.operand, "best": best.data(),
        "cublas_ms": round(cublas.median, 5), "now": configs[0].data(),
        "ratio_to_plain": round(best.times.median / cublas.median, 4),
        "candidates": [c.data() for c in [*ranked, *(c for c in made if c not in ranked)]],
    }  # fmt: skip


def line(name: str, record: Mapping[str, Any]) -> str:
    shown = []
    for c in record["candidates"]:
        if "median_ms" in c:
            config = Configuration.of(c["config"], "")
            mark = " (now)" if c["config"] == record["now"] else ""
            shown.append(f"{config} s{c['config']['max_swizzle']} {c['median_ms']:.4f}{mark}")
    size = f"{record['m']}x{record['n']}x{record['k']} {record['layout']}"
    return f"{size} {record['family']}: cuBLAS {record['cublas_ms']:.4f}; " + ", ".join(shown)


def measure_all(
    named: Mapping[str, Mapping[str, Problem]],
    out: Path,
    budget: float,
    workers: int,
) -> None:
    """Compile everything, then measure kernel by kernel."""
    begun = time.monotonic()
    known = records()
    wanted = {
        (shape, name): (p, candidates(p, known, VARIED if shape.startswith(TASK) else USUAL))
        for shape, found in named.items()
        for name, p in found.items()
        if name not in kept(file_of(out, shape)).get("kernels", {})
    }
    jobs = [Job(p, c) for p, configs in wanted.values() for c in configs]
    statics = compile_all(jobs, Path(quack.cache_folder()), workers=workers)
    bad = {s.error for s in statics.values() if s.error}
    print(f"{time.monotonic() - begun:.0f} s: {len(statics)} kernels {sorted(bad)[:2]}", flush=True)
    timer = SustainedTimer(torch.device("cuda", torch.cuda.current_device()))
    seen: dict[Problem, dict[str, Any]] = {}
    for (shape, name), (problem, configs) in wanted.items():
        if time.monotonic() - begun > budget:
            print("not complete: run it again to go on")
            return
        if problem not in seen:
            with torch.no_grad():
                found = kernel_record(problem, statics, configs, timer)
            if found is None:
                continue
            seen[problem] = found
            print(f"{time.monotonic() - begun:.0f} s  {line(name, found)}", flush=True)
        file = file_of(out, shape)
        data = kept(file) or {"shape": shape, "environment": environment(), "kernels": {}}
        data["kernels"][name] = seen[problem]
        write_json(file, data)
        torch.cuda.empty_cache()


def file_of(out: Path, shape: str) -> Path:
    return out / (f"{shape}.json" if shape.startswith(TASK) else f"sustained_{shape}.json")


def kept(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    found: dict[str, Any] = json.loads(file.read_text())
    return found


# ------------------------------------------------------------------------------------ defaults
def write_defaults(out: Path, target: Path) -> None:
    """The winners in the package's data file, in place of the entries of the same kernels."""
    found = []
    for file in sorted(out.glob("sustained_*.json")):
        data = json.loads(file.read_text())
        found += [(data["environment"], kernel) for kernel in data["kernels"].values()]
    target.write_text(shipped.merged(target.read_text(), found))
    print(f"{target}: {len(found)} kernels")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--shape", action="append", default=[], choices=[s.name for s in ALL_SHAPES]
    )
    parser.add_argument("--loss", action="append", default=[], help="a shape of loss.py")
    parser.add_argument("--model", action="append", default=[], help="a case of llama.py")
    parser.add_argument("--task", action="append", default=[], help="a task of author_tasks.py")
    parser.add_argument("--only", default="", help="kernels with this in size, layout and family")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds")
    parser.add_argument("--workers", type=int, default=0, help="compile processes")
    parser.add_argument("--write-defaults", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.write_defaults:
        write_defaults(args.out, shipped.FILE)
        return
    named: dict[str, dict[str, Problem]] = {}
    for shape in ALL_SHAPES:
        if shape.name in args.shape:
            named[shape.name] = problems(shape, TOKENS)
    for shape_name in args.loss:
        named[f"loss_{shape_name}"] = loss_problems(shape_name)
    named |= {model: model_problems(model) for model in args.model}
    named |= {TASK + task: task_problems(task) for task in args.task}
    named = {x: selected(found, args.only) for x, found in named.items()}
    measure_all(named, args.out, args.budget, args.workers)


if __name__ == "__main__":
    main()
