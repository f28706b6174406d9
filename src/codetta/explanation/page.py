"""An Explanation as one HTML page that loads nothing."""

from __future__ import annotations

from html import escape

from codetta._version import __version__
from codetta.explanation.drawing import drawing, legend, table
from codetta.explanation.facts import GEMM, KINDS, MEMORY, Explanation, RegionFact, total
from codetta.explanation.text import heading, phases
from codetta.explanation.units import amount, duration, times

_CSS = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1b1f24; --dim: #59636e; --line: #d5dae0;
  --soft: #f5f7f9; --gemm: #cfe3fb; --gemm-edge: #2a6fc4; --memory: #fde3c4;
  --memory-edge: #b8640a; --attention: #e6daf8; --attention-edge: #7a4bc0; --good: #17723a; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171b; --fg: #e4e8ec; --dim: #9aa5b1;
  --line: #343b43; --soft: #1c2126; --gemm: #173a63; --gemm-edge: #5aa2f0; --memory: #55340f;
  --memory-edge: #eba04c; --attention: #3a2760; --attention-edge: #b08bea; --good: #5fd08a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 78rem; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h4 { margin: 1rem 0 .3rem; } h5 { margin: .4rem 0; color: var(--dim); font-weight: 600; }
p { max-width: 60rem; } p, small, .dim { color: var(--dim); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .8rem;
  margin: 1.2rem 0; }
.tile { background: var(--soft); border: 1px solid var(--line); border-radius: 8px;
  padding: .7rem 1rem; }
.tile b { display: block; font-size: 1.5rem; color: var(--good); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; vertical-align: top; }
th { color: var(--dim); font-weight: 600; }
th:first-child, td:first-child, .reasons th:last-child, .reasons td:last-child { text-align: left; }
.reasons td:last-child, td:first-child { white-space: normal; }
.box { display: inline-flex; gap: .4rem; align-items: baseline; border-radius: 5px;
  padding: .1rem .45rem; margin: 0 .35rem .35rem 0; border: 1px solid; font-size: .85rem; }
.box small { color: inherit; opacity: .75; }
.gemm { background: var(--gemm); border-color: var(--gemm-edge); fill: var(--gemm-edge); }
.memory { background: var(--memory); border-color: var(--memory-edge); fill: var(--memory-edge); }
.attention { background: var(--attention); border-color: var(--attention-edge);
  fill: var(--attention-edge); }
.sides { display: grid; grid-template-columns: minmax(0, 2fr) minmax(0, 3fr); gap: 1.5rem; }
@media (max-width: 52rem) { .sides { grid-template-columns: minmax(0, 1fr); } }
.card { border-style: solid; border-width: 1px 1px 1px 5px; border-radius: 6px;
  margin-bottom: .4rem; font-size: .88rem; overflow: hidden; }
.card summary { padding: .3rem .6rem; cursor: pointer; }
.card .cost { float: right; margin-left: .8rem; opacity: .75; }
.card .brief { font-size: .82rem; margin: .3rem -.6rem -.3rem; padding: .15rem .6rem .2rem 1.5rem;
  border-top: 1px dashed var(--dim); background: color-mix(in srgb, var(--bg) 55%, transparent); }
.card .formulas { background: var(--bg); border-top: 1px dashed var(--line); padding: .4rem .8rem;
  font: .82rem/1.5 ui-monospace, monospace; overflow-wrap: anywhere; border-radius: 0 0 5px 0; }
code { font: .92em ui-monospace, monospace; overflow-wrap: anywhere; }
.bar { display: grid; grid-template-columns: 4rem 1fr 13rem; gap: .6rem; align-items: center;
  font-size: .85rem; color: var(--dim); margin-bottom: .2rem; }
.bar svg { width: 100%; height: 18px; background: var(--soft); border-radius: 3px; }
.bar rect { stroke: var(--bg); stroke-width: .5; }
details.region { border: 1px solid var(--line); border-radius: 8px; padding: .5rem 1rem;
  margin-bottom: .8rem; }
details.region > summary { cursor: pointer; font-weight: 600; }
"""


def page(found: Explanation) -> str:
    """The page."""
    title = escape(f"CODA on {found.model}")
    largest = max(found.regions, key=lambda r: r.count * len(r.before), default=None)
    parts = [
        f"<h1>{title}</h1><p>{escape(heading(found).split(': ', 1)[1])}</p>",
        _tiles(found),
        _totals(found),
        *(f"<p>{escape(note)}</p>" for note in found.notes),
        "<h2>Regions</h2><p>What lies between one attention and the next, and what it became. "
        "Open a kernel to see its formulas; <code>acc</code> is the GEMM's accumulator.</p>",
        f"<div>{legend()}</div>",
        *(_region(found, r, r is largest) for r in found.regions),
        _left(found),
        _method(found),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_CSS}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _tiles(found: Explanation) -> str:
    before, after = (found.total(w) for w in ("before", "after"))
    tiles = (
        ("kernels", times(before.kernels, after.kernels), f"{before.kernels} → {after.kernels}"),
        (
            "bytes moved",
            times(before.bytes, after.bytes),
            f"{amount(before.bytes)} → {amount(after.bytes)}",
        ),
        (
            f"at least, on {found.gpu.name}",
            times(before.seconds, after.seconds),
            f"{duration(before.seconds)} → {duration(after.seconds)}",
        ),
    )
    inner = "".join(
        f'<div class="tile">{escape(name)}<b>{factor} less</b>{pair}</div>'
        for name, factor, pair in tiles
    )
    return f'<div class="tiles">{inner}</div>'


def _totals(found: Explanation) -> str:
    rows = []
    names = {"gemm": "GEMM", "memory": "memory-bound", "attention": "attention"}
    for phase in phases(found):
        for kind in KINDS:
            pair = [found.total(w, phase, kind) for w in ("before", "after")]
            if any(t.kernels for t in pair):
                cells = [str(t.kernels) for t in pair] + [amount(t.bytes) for t in pair]
                rows.append(
                    [f"{phase} {names[kind]}", *cells, *(duration(t.seconds) for t in pair)]
                )
    at = found.gpu.name
    return table(
        ("", "kernels before", "after", "bytes before", "after", f"{at} before", "after"), rows
    )


def _region(found: Explanation, region: RegionFact, is_open: bool) -> str:
    often = f", {region.count} times" if region.count > 1 else ""
    fused = ", ".join(f"{n} {escape(name)}" for name, n in region.operations)
    counts = []
    for kind in (GEMM, MEMORY):
        pair = [
            total(((k, 1) for k in ks), found.gpu, None, kind).kernels
            for ks in (region.before, region.after)
        ]
        counts.append(f"{pair[0]} → {pair[1]}")
    moved = [sum(k.bytes for k in ks) for ks in (region.before, region.after)]
    spent = [sum(k.seconds(found.gpu) for k in ks) for ks in (region.before, region.after)]
    rows = [[*counts, " → ".join(map(amount, moved)), " → ".join(map(duration, spent))]]
    headings = ("GEMMs", "memory-bound kernels", "bytes", f"at least, on {found.gpu.name}")
    return (
        f'<details class="region"{" open" if is_open else ""}><summary>{escape(region.label)}'
        f"{often}</summary>{table(headings, rows)}<p>In place of {fused}.</p>"
        f"{drawing(found, region)}</details>"
    )


def _left(found: Explanation) -> str:
    rows = []
    ordered = sorted(found.left, key=lambda x: -x.count * sum(k.bytes for k in x.kernels))
    for x in ordered:
        kernels = str(x.count * len(x.kernels)) if x.kernels else "a view"
        moved = amount(x.count * sum(k.bytes for k in x.kernels)) if x.kernels else ""
        rows.append(
            [
                f"<code>{escape(x.what)}</code> in {escape(x.where or 'the model')}",
                str(x.count),
                kernels,
                moved,
                escape(x.reason),
            ]
        )
    inner = table(("operation", "times", "kernels", "bytes", "because"), rows)
    return f'<h2>Left alone</h2><div class="reasons">{inner}</div>'


def _method(found: Explanation) -> str:
    return (
        "<h2>How this is counted</h2><p>A kernel reads each tensor once and writes each result "
        "once. Before: every PyTorch operation that is not a view is a kernel, as eager execution "
        "runs it. After: the kernels of the schedules, and what is left as before; torch.compile "
        "fuses that further. Time is the roofline: the longer of moving the bytes at "
        f"{found.gpu.bandwidth / 1e12:g} TB/s and the matrix products at their peak rate; nothing "
        "runs faster, and launches are not counted. Work on weights (packing, folding the norms' "
        f"weights) runs in every forward and backward, and is counted there.</p>"
        f"<p>codetta {__version__}</p>"
    )
