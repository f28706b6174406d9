"""Which kernels are compiled: the library's programs, and those of a decoder's segments.

Segments are scheduled for layers of three widths and 16384 tokens, with biases and with query-key
norm, too, and once with SwiGLU's output kept for the backward (``recompute=False``). Kernels that
differ only in names and sizes are compiled once, under the first of their names: a kernel's sizes
are free, and what they decide is the configuration.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, replace

import torch

from codetta import programs
from codetta.backends.cuda.accumulate import bf16_sum
from codetta.backends.cuda.configs import Configuration, choose
from codetta.backends.cuda.forms import MAINLOOP, Lowered
from codetta.backends.cuda.launch import explain
from codetta.backends.cuda.lowering import lower
from codetta.language import Col, Row, Tile, epilogue, rowsum, store
from codetta.language.program import Program
from codetta.loss import epilogues
from codetta.loss.options import Logits
from codetta.nn import block
from codetta.plan import Schedule
from codetta.tuning.compile_only import Job

TOKENS = 16384
#: Hidden and MLP width, query and key-value heads of 128 columns.
LAYERS = ((2048, 8192, 16, 16), (4096, 14336, 32, 8), (8192, 28672, 64, 8))
VARIANTS = {
    "": {},
    "bias": {"biases": frozenset(("wq", "wk", "wv"))},
    "qk-norm": {"qk_norm": True},
}


def library(sm: str) -> dict[str, Job]:
    """Kernels by name; programs that are not one kernel (``explain``) are left out.

    On Hopper in the configurations the backend chooses. It has none for Blackwell: there in one
    that serves every epilogue.
    """
    found: dict[tuple, tuple[str, Job]] = {}
    for name, program, (m, n, k), layout, dtype in (*_catalog(), *_segments()):
        operand = MAINLOOP[getattr(torch, dtype)]
        if explain(program, operand) is None:
            lowered = lower(program, operand)
            config = _blackwell(lowered) if sm == "100" else choose(lowered, m, n, k, layout)
            # The raster order is an argument of the kernel, not part of it.
            key = (lowered.source, layout, replace(config, provenance="", max_swizzle=0))
            given = astuple(config) if sm == "100" else None
            found.setdefault(key, (name, Job(program.text, m, n, k, layout, dtype, given)))
    return dict(found.values())


def job(name: str, **changes) -> Job:
    """A catalog program at small sizes: m, n, k, dtype and config are its defaults' changes."""
    program, layout, dtype = next((p, x, d) for n, p, _, x, d in _catalog() if n == name)
    sizes = {"m": 1024, "n": _columns(program, 1536), "k": 512}
    return Job(program.text, **({**sizes, "layout": layout, "dtype": dtype} | changes))


def under_autocast() -> dict[str, Job]:
    """A residual stream and its gradient in fp32, stored once more in bf16 for the next product."""

    @epilogue
    def residual(acc, stream: Tile):
        x = acc + stream
        return {"x": store(x, "fp32"), "narrow": x, "ssq": rowsum(x * x)}

    @epilogue
    def dgrad(acc, gamma: Row, stream: Tile, grad: Tile, c: Col):
        d = acc * gamma + grad - stream * c
        return {"d": store(d, "fp32"), "narrow": d}

    shapes = {residual: ("nt", 2048), dgrad: ("nn", 4096)}
    return {
        p.name: Job(p.text, TOKENS, n, n, layout, wide=True) for p, (layout, n) in shapes.items()
    }


def loss_head() -> dict[str, Job]:
    """Statistics of a chunk of logits, shifted exponentials, the derivative computed again; dx from
    shifted exponentials, products added to sums of dW, in 24 bits, in 20 and in bf16."""
    plain, rich = Logits(), Logits(bias=True, scale=0.5, cap=30.0)
    scaled = Logits(rows=True)
    chunk, vocabulary, hidden = 4096, 128256, 2048
    over_logits = {
        "statistics": epilogues.statistics(plain, False, False, False, False, ""),
        "statistics, logits kept": epilogues.statistics(
            plain, False, False, False, False, "rounded"
        ),
        "statistics, scaled": epilogues.statistics(scaled, False, False, False, True, "rounded"),
        "statistics, all": epilogues.statistics(rich, True, True, False, False, "rounded"),
        "shifted": epilogues.shifted(plain),
        "shifted, all": epilogues.shifted(Logits(bias=True, scale=0.5, rows=True)),
        "derivative": epilogues.derivative(plain, False, False),
        "derivative, scaled": epilogues.derivative(scaled, False, False),
        "derivative, all": epilogues.derivative(rich, True, True),
    }
    found = {n: Job(p.text, chunk, vocabulary, hidden, "nt") for n, p in over_logits.items()}
    rows = epilogues.scaled_rows.text
    found["scaled rows"] = Job(rows, chunk, hidden, vocabulary, "nn")
    kinds = (f"sum{bits} {kind}" for bits in (24, 20) for kind in ("first", "further", "last"))
    sums = {name: name for name in kinds}
    sums["bf16 sum"] = bf16_sum.text
    return found | {n: Job(text, vocabulary, hidden, chunk, "tn") for n, text in sums.items()}


def _blackwell(lowered: Lowered) -> Configuration:
    """256x128 over two CTAs; column sums, whose partials are per CTA, in one."""
    alone = any(s.over == "m" for s in lowered.sinks)
    return Configuration(128, 128, False, 1) if alone else Configuration(256, 128, False)


#: Name, program, (m, n, k), layout, dtype of a and b.
_Item = tuple[str, Program, tuple[int, int, int], str, str]


def _catalog() -> Iterator[_Item]:
    for name, entry in programs.catalog().items():
        program = entry.program
        if program.has_acc:
            dgrad = name.endswith(("backward", "unscaled")) or "dgrad" in name
            layout = "tn" if "wgrad" in name else "nn" if dgrad else "nt"
            dtype = "float8_e4m3fn" if entry.family == "fp8" else "bfloat16"
            yield name, program, (TOKENS, _columns(program, 2048), 2048), layout, dtype


def _columns(program: Program, n: int) -> int:
    """The next N that the pairs and groups of a program and 16 bytes divide."""
    while n % program.granule:
        n += 8
    return n


def _segments() -> Iterator[_Item]:
    parts = (block.ENTRY, block.MIDDLE, block.EXIT)
    made = [(s, p, v, True) for s, p, v in itertools.product(LAYERS, parts, VARIANTS)]
    made.append((LAYERS[0], block.MIDDLE, "", False))  # its dz is stored without SwiGLU's output
    for sizes, part, variant, recompute in made:
        yield from _segment(sizes, part, variant, recompute)


def _segment(
    sizes: tuple[int, int, int, int], part: str, variant: str, recompute: bool
) -> Iterator[_Item]:
    hidden, mlp, heads, kv_heads = sizes
    spec = block.Spec(part, hidden, mlp, heads, kv_heads, 128, 128, **VARIANTS[variant])
    plan = block.segment(spec, block.ADJACENT)
    wrt = tuple(i.name for i in plan.inputs if i.name not in ("is_qk", "rope"))
    outputs = tuple(o.name for o in plan.outputs)
    made = block.compiled(plan, wrt, outputs, recompute=recompute)
    assert made.backward is not None
    kept = "" if recompute else "kept"
    for way, schedule in (("forward", made.forward), ("backward", made.backward)):
        yield from _gemms(" ".join(filter(None, (part, variant, kept, way))), schedule)


def _gemms(name: str, schedule: Schedule) -> Iterator[_Item]:
    """The GEMM kernels of a schedule, named by their layout and what is multiplied."""
    for kernel in schedule.kernels:
        if kernel.kind != "gemm":
            continue
        assert kernel.program is not None
        layout = schedule.plan.nodes[kernel.root].attr("layout")
        a = schedule.plan.nodes[kernel.reads[0]].type
        rows, cols = (TOKENS if x == "M" else int(x) for x in (a.rows, a.cols))
        m, k = (cols, rows) if layout == "tn" else (rows, cols)
        size = (m, kernel.cols, k)
        full = f"{name} {layout} {'x'.join(map(str, size))}"
        yield full, kernel.program, size, layout, "bfloat16"
