"""RESULTS.md and its plots, from the JSON files under results/.

    python benchmarks/report.py             # writes benchmarks/RESULTS.md and benchmarks/plots/
    python benchmarks/report.py --check     # fails if RESULTS.md is not what the JSON says

Of several records of one shape the newest counts, by the date in it and then by the name of its
folder. No number is typed by hand: the text around the tables is here, the numbers come from the
files, and the same files give the same page.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import kernels
import layer
import llama
import loss
from layer_model import SHAPES
from llama_models import CASES

HERE = Path(__file__).resolve().parent
TITLE = """# Results

Made by `python benchmarks/report.py` from the files under `results/`; edit that, not this page.
How each thing is measured stands at the head of its script, what disturbed a run in
[README.md](README.md#what-was-run).
"""
LAYER = """
## One decoder layer

Attention excluded, bf16 (`benchmarks/layer.py`). Times are medians in ms per step; backward is
forward + backward less forward. Ratios are medians of per-round ratios with a 95 % bootstrap
interval; the floor is the layer's twelve plain GEMMs by cuBLAS. Peak memory is above inputs,
gradients included. The last column is the largest ‖difference to eager‖ / ‖eager‖ over output and
gradients: two correct bf16 computations differ by some 0.01.
"""
MODELS = f"""
## Whole models

A training step of Hugging Face models with random weights, bf16 (`benchmarks/llama.py`): 'step'
is forward + backward with the loss, 'decoder' the same without head and loss. Times are medians
in ms per step. Ratios are to CODA in the same process (without logits where the model with them
did not run), medians of per-round ratios with a 95 % bootstrap interval; rows of another
process say so, and their times are not to be compared with the others. Peak memory is above the
weights, gradients included. The last two columns are ‖difference to eager‖ / ‖eager‖ of the
output (of a step its loss) and, the largest, of the gradients of a few weights; eager's own row
is a second step of it. A contender that is more than {llama.WRONG} away is marked as wrong: its
time and memory do not count, since what it leaves out would look like speed.
"""
KERNELS = """
## Kernel by kernel

Each GEMM with its epilogue against the faster of its plain GEMMs (cuBLAS, and QuACK's mainloop in
its best tile); kernels that only move memory against bytes over the bandwidth of a large copy in
the same run (`benchmarks/kernels.py`). Times in ms per call.
"""
LOSS = """
## Head and loss

The head's product with its cross-entropy, bf16, mean loss (`benchmarks/loss.py`). Times are medians
in ms; 'evaluate' is the loss alone, 'forward' the loss of a training step, backward is both less
forward. The floor is the head's three plain GEMMs by cuBLAS in chunks of rows, without a loss.
Memory is the peak above inputs and gradients; errors are relative, against fp64.
"""
COLD = """
## Cold start

Seconds from process start to the end of the first training step of a random 16-layer Llama, hidden
2048 (`benchmarks/cold_start.py`): with empty caches, with the caches of a run before, and with
empty caches and all kernels compiled at once first.
"""
#: What CODA should reach forward + backward: torch.compile's time over CODA's at least, CODA's time
#: over the floor at most.
AIMS = {"d2048": (1.07, 1.05), "d4096": (1.05, 1.02), "d8192": (1.03, 1.02)}
KERNEL_AIM = 1.08
COLD_AIMS = {"cold": 60.0, "warm": 10.0}
ORDER = [s.name for s in SHAPES]
#: Added to the names of contenders that were not measured in the process of the others.
OTHER = ", another process"


# ------------------------------------------------------------------------------------ records
def records(folder: Path, prefix: str, *, beside: bool = False) -> dict[str, dict[str, Any]]:
    """The newest record of each shape, in the order of the shapes.

    ``beside``: of those further down in the folder of a run, of processes that measured a few
    contenders only.
    """
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.rglob(f"{prefix}_*.json")):
        record = json.loads(file.read_text())
        if not current(record):
            continue
        name = record["shape"]["name"]
        place = file.relative_to(folder)
        record["file"] = place.as_posix()
        if (len(place.parts) > 2) is not beside:
            continue
        if name not in found or date(found[name]) <= date(record):
            found[name] = record
    places = {n: i for i, n in enumerate(ORDER)}
    return dict(sorted(found.items(), key=lambda x: (places.get(x[0], len(ORDER)), x[0])))


def current(record: dict[str, Any]) -> bool:
    """Whether a record was made by the method described above; earlier ones were not."""
    return "steps_per_sample" in record or "copy_bytes_per_s" in record


def date(record: dict[str, Any]) -> str:
    return str(record["environment"]["date"])


def cold_record(folder: Path) -> dict[str, Any] | None:
    files = [(json.loads(f.read_text()), f) for f in sorted(folder.rglob("cold_start.json"))]
    if not files:
        return None
    record, file = max(files, key=lambda x: (date(x[0]["runs"][0]), x[1]))
    return {**record, "file": file.relative_to(folder).as_posix()}


def model_runs(folder: Path) -> list[list[dict[str, Any]]]:
    """Of each case and part the newest run: its record, then those of other processes in that run.

    A run is a folder of ``folder``. A record further down in it is of another process, to which a
    contender may have been moved that stops the others.
    """
    found: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for file in sorted(folder.rglob("llama_*.json"), key=lambda f: (len(f.parts), f)):
        record = json.loads(file.read_text())
        if not current(record):  # the times of first steps (llama_compile_*) have no part
            continue
        case, place = record["case"], file.relative_to(folder)
        record |= {"file": place.as_posix(), "tokens": case["batch"] * case["seq"]}
        runs = found.setdefault((case["name"], record["part"]), {})
        runs.setdefault(place.parts[0], []).append(record)
    places = {n: i for i, n in enumerate(CASES)}
    order = sorted(
        found, key=lambda x: (places.get(x[0], len(places)), x[0], llama.PARTS.index(x[1]))
    )
    return [max(found[x].items(), key=lambda run: (date(run[1][0]), run[0]))[1] for x in order]


# --------------------------------------------------------------------------------------- page
def page(folder: Path) -> str:
    """RESULTS.md of the records under ``folder``."""
    layers, parts = records(folder, "layer"), records(folder, "kernels")
    found = [TITLE]
    if layers:
        found += [LAYER, aims(layers), "![Layer](plots/layer.png)\n"]
        found += [layer_section(r) for r in layers.values()]
        found += [layer_section(r, OTHER) for r in records(folder, "layer", beside=True).values()]
    models = model_runs(folder)
    if models:
        found += [MODELS, *(model_section(r) for r in models)]
    if parts:
        found += [KERNELS, "![Kernels](plots/kernels.png)\n"]
        found += [kernel_section(r) for r in parts.values()]
    heads = records(folder, "loss")
    if heads:
        found += [LOSS, *(loss_section(r) for r in heads.values())]
    cold = cold_record(folder)
    if cold:
        found.append(COLD + "\n" + cold_section(cold))
    if len(found) == 1:
        found.append("\nNothing has been measured by these scripts yet.\n")
    return "\n".join(x.strip("\n") + "\n" for x in found)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    ruled = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join([*ruled, *(f"| {' | '.join(r)} |" for r in rows)]) + "\n"


def provenance(record: dict[str, Any], *more: str) -> str:
    """Where numbers come from; ``more`` are packages to name beside those of all benchmarks."""
    e = record["environment"]
    names = ("torch", "triton", "quack-kernels", "liger-kernel", *more)
    packages = ", ".join(f"{n} {e[n]}" for n in names if e.get(n))
    return (
        f"M {record['tokens']}; {e['gpu'] or 'no GPU'}; {packages}; {e['date']}, commit "
        f"{e['commit'][:20]}; clocks, power and temperature before: {e['state'] or 'unknown'}, "
        f"after: {e.get('state_after') or 'unknown'}; `results/{record['file']}`.\n"
    )


def interval(found: tuple[float, float, float] | None) -> str:
    return "" if found is None else f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]"


def aims(layers: dict[str, dict[str, Any]]) -> str:
    """CODA against what it should reach."""
    rows = []
    for name, record in layers.items():
        summary = layer.summary(record)
        if "coda" not in summary or name not in AIMS:
            continue
        row, (faster, at_most) = summary["coda"], AIMS[name]
        against = row["both/compile"]
        gain = 1 / against[0] if against else float("nan")
        over = row["both/floor"][0]
        memory = row["gib"] - summary.get("torch.compile", row)["gib"]
        paper = [r["both_ms"] for n, r in summary.items() if n.startswith("paper form")]
        rows.append(
            (name, verdict(gain, faster, gain >= faster), verdict(over, at_most, over <= at_most),
             f"{memory:+.2f} GiB", f"{min(paper) / row['both_ms']:.3f}" if paper else "")
        )  # fmt: skip
    head = ("shape", "times faster than torch.compile (aim)", "times the floor (aim)",
            "peak memory against torch.compile", "times faster than the paper's form")  # fmt: skip
    return markdown(head, rows) if rows else ""


def verdict(value: float, aim: float, reached: bool) -> str:
    return f"{value:.3f} ({aim:.2f}, {'reached' if reached else 'missed'})"


def title(record: dict[str, Any], mark: str = "") -> str:
    s = record["shape"]
    return f"### {s['name']}{mark}: d {s['d']}, f {s['f']}, heads {s['heads']}/{s['kv_heads']}\n"


def layer_section(record: dict[str, Any], mark: str = "") -> str:
    rows = []
    for name, r in layer.summary(record).items():
        times = [f"{r[k]:.3f}" for k in ("forward_ms", "backward_ms", "both_ms")]
        ratios = [interval(r[k]) for k in ("forward/floor", "both/floor", "both/compile")]
        memory = f"{r['gib']:.2f}" if r["gib"] else ""
        difference = "" if r["difference"] is None else f"{r['difference']:.1e}"
        rows.append((name, *times, *ratios, memory, difference))
    head = ("", "forward", "backward", "both", "forward / floor", "both / floor",
            "both / torch.compile", "peak GiB", "difference")  # fmt: skip
    failed = [f"- {n}: {x}\n" for n, x in sorted(record["notes"].items()) if "failed" in x]
    rounds = f"{record['rounds']} rounds of {record['steps_per_sample']} steps. "
    return "\n".join(
        [title(record, mark), markdown(head, rows), *failed, rounds + provenance(record)]
    )


def model_section(run: Sequence[dict[str, Any]]) -> str:
    """One table of all processes of a run, and below it where each one's numbers come from."""
    case = run[0]["case"]
    s = case["sizes"]
    head = (
        f"### {case['name']}, {run[0]['part']}: {s['num_hidden_layers']} layers, "
        f"d {s['hidden_size']}, f {s['intermediate_size']}, heads {s['num_attention_heads']}/"
        f"{s['num_key_value_heads']}, V {s['vocab_size']}, {case['batch']} × {case['seq']} tokens\n"
    )
    rows, notes, sources = [], [], []
    for record, mark in zip(run, ["", *[OTHER] * (len(run) - 1)], strict=True):
        rows += model_rows(record, mark)
        notes += [
            f"- {n}{mark}: failed: {textwrap.shorten(why, 120, placeholder=' …')}\n"
            for n, why in record["failed"].items()
        ]
        rounds = f"{record['rounds']} rounds, steps per sample: {record['steps_per_sample']}. "
        which = "Another process: " if mark else ""
        sources.append(which + rounds + provenance(record, "transformers"))
    output = "loss" if run[0]["part"] == "step" else "output"
    columns = ("", "ms", "ms / CODA's", "peak GiB", f"{output} difference", "gradient difference")
    return "\n".join([head, markdown(columns, rows), *notes, *sources])


def model_rows(record: dict[str, Any], mark: str) -> list[tuple[str, ...]]:
    """Cells of the contenders of one process: those timed, and those that are wrong."""
    rows: list[tuple[str, ...]] = []
    differences = record["relative_difference_to_eager"]
    # not `any(x > ...)`: NaN is wrong, too
    wrong = [n for n, d in differences.items() if not all(x <= llama.WRONG for x in d.values())]
    right = record | {"times_ms": {n: t for n, t in record["times_ms"].items() if n not in wrong}}
    summary, base = llama.summary(right), llama.base(right)
    for name, difference in differences.items():
        if name in wrong:
            cells = ("", "wrong", "")
        elif name in summary:
            r = summary[name]
            ratio = (1.0, 1.0, 1.0) if name == base else r["speedup"]
            memory = f"{r['gib']:.2f}" if r["gib"] else ""
            cells = (f"{r['ms']:.2f}", interval(ratio), memory)
        else:  # failed after its first step
            continue
        gradients = max(x for n, x in difference.items() if n != "output")
        rows.append((name + mark, *cells, f"{difference['output']:.1e}", f"{gradients:.1e}"))
    return rows


def kernel_section(record: dict[str, Any]) -> str:
    gemms = []
    for g in kernels.gemm_rows(record):
        ms = [f"{g['ms'][n]:.4f}" if n in g["ms"] else "" for n in ("coda", "cublas", "quack")]
        size = " × ".join(map(str, g["mnk"]))
        over = "" if g["ratio"][0] <= KERNEL_AIM else f"above {KERNEL_AIM}"
        gemms.append((g["role"], size, *ms, interval(g["ratio"]), over))
    head = ("GEMM", "M × N × K", "CODA", "cuBLAS", "QuACK", "CODA / best plain", "")
    moved = [
        (m["name"], f"{m['bytes'] / 1e6:.2f}", f"{m['ms']:.4f}", f"{m['floor_ms']:.4f}",
         f"{m['ratio']:.2f}")
        for m in kernels.memory_rows(record)
    ]  # fmt: skip
    memory = markdown(("memory", "MB", "ms", "floor ms", "times the floor"), moved)
    copy = f"Copy {record['copy_bytes_per_s'] / 1e12:.2f} TB/s. "
    return "\n".join([title(record), markdown(head, gemms), memory, copy + provenance(record)])


def loss_section(record: dict[str, Any]) -> str:
    s, rows = record["shape"], loss.rows(record)
    best = min((r for r in rows if not r[0].startswith("floor")), key=lambda r: float(r[4]))
    head = f"### {s['name']}: D {s['d']}, V {s['v']}\n"
    notes = [f"- {x}\n" for x in loss.absent(record)]
    said = f"Fastest: {best[0]}. {record['rounds']} rounds of {record['steps_per_sample']} steps. "
    return "\n".join([head, markdown(loss.HEAD, rows), *notes, said + provenance(record)])


def cold_section(record: dict[str, Any]) -> str:
    stages = list(dict.fromkeys(s for r in record["runs"] for s in r["stages_s"]))
    rows = []
    for r in record["runs"]:
        total, aim = r["to_first_step_s"], COLD_AIMS.get(r["mode"])
        reached = f"{total:.1f}" if aim is None else verdict(total, aim, total <= aim)
        parts = [f"{r['stages_s'][s]:.1f}" if s in r["stages_s"] else "" for s in stages]
        builds = f"{r['kernel_builds']['count']} in {r['kernel_builds']['seconds']:.1f} s"
        rows.append((r["mode"], reached, *parts, builds))
    first = record["runs"][0] | {"file": record["file"]}
    head = ("caches", "to first step (aim)", *stages, "kernels built or loaded")
    return markdown(head, rows) + "\n" + provenance(first)


# -------------------------------------------------------------------------------------- plots
def plots(folder: Path, out: Path) -> None:
    """layer.png and kernels.png, bars against the floor with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    layers, parts = records(folder, "layer"), records(folder, "kernels")
    out.mkdir(parents=True, exist_ok=True)
    if layers:
        groups: dict[str, dict[str, Any]] = {}
        for name, record in layers.items():
            for contender, row in layer.summary(record).items():
                if contender != "floor":
                    groups.setdefault(contender, {})[name] = row["both/floor"]
        bars(groups, list(layers), "forward + backward / twelve plain cuBLAS GEMMs", 1.0,
             out / "layer.png")  # fmt: skip
    if parts:
        groups = {}
        for name, record in parts.items():
            groups[name] = {g["role"]: g["ratio"] for g in kernels.gemm_rows(record)}
        roles = list(dict.fromkeys(r for g in groups.values() for r in g))
        bars(groups, roles, "kernel / its best plain GEMM", KERNEL_AIM, out / "kernels.png")


def bars(
    groups: dict[str, dict[str, Any]], places: list[str], label: str, line: float, file: Path
) -> None:
    """Grouped bars: groups[series][place] = (value, low, high)."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(max(7.0, 0.9 * len(places) + 3), 4.2))
    width = 0.84 / len(groups)
    for i, (series, values) in enumerate(groups.items()):
        found = [(p, *values[place]) for p, place in enumerate(places) if place in values]
        at = [p + (i - (len(groups) - 1) / 2) * width for p, *_ in found]
        middle = [m for _, m, _, _ in found]
        below, above = [m - lo for _, m, lo, _ in found], [hi - m for _, m, _, hi in found]
        axes.bar(at, middle, width, yerr=(below, above), label=series, error_kw={"lw": 0.8})
    axes.axhline(line, color="black", lw=0.8)
    lowest = min(v[1] for g in groups.values() for v in g.values())
    axes.set_ylim(bottom=max(0.0, min(0.9, lowest - 0.05)))
    axes.set_xticks(range(len(places)), places, rotation=25 if len(places) > 6 else 0, fontsize=8)
    axes.set_ylabel(label)
    axes.legend(fontsize=8, ncols=2)
    figure.tight_layout()
    figure.savefig(file, dpi=140, metadata={"Software": None})
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE, help="where RESULTS.md and plots/ go")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    args = parser.parse_args(arguments)
    made, file = page(args.results), args.out / "RESULTS.md"
    if args.check:
        same = file.exists() and file.read_text() == made
        print("RESULTS.md is what the records say" if same else "RESULTS.md is out of date")
        return int(not same)
    file.write_text(made)
    plots(args.results, args.out / "plots")
    return 0


if __name__ == "__main__":
    sys.exit(main())
