"""A region before and after as boxes: GEMMs with their epilogues attached, and what lies between.

Plain HTML and CSS; every box carries its numbers as text, so the page can be read and searched
without looking at colours.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from codetta.explanation.facts import GEMM, KINDS, Explanation, KernelFact, RegionFact
from codetta.explanation.text import phases
from codetta.explanation.units import amount, duration

_ROLE = {
    "gemm": "GEMM", "prepare": "weights", "finalize": "finalizer", "pointwise": "pointwise",
    "move": "copy", "join": "join", "opaque": "other", "operation": "", "attention": "attention",
}  # fmt: skip


def drawing(found: Explanation, region: RegionFact) -> str:
    """Both sides of a region, forward over backward."""
    rows = []
    for phase in phases(found):
        sides = [
            [k for k in kernels if k.phase == phase] for kernels in (region.before, region.after)
        ]
        if any(sides):
            rows.append(
                f'<div class="phase"><h4>{phase}</h4>{_bars(found, sides)}'
                f'<div class="sides"><div class="side"><h5>before: PyTorch, one by one</h5>'
                f'<div class="flow">{"".join(_operation(found, k) for k in sides[0])}</div></div>'
                f'<div class="side"><h5>after: GEMMs with epilogues</h5>'
                f'<div class="flow">{"".join(_kernel(found, k) for k in sides[1])}</div></div>'
                "</div></div>"
            )
    return "".join(rows)


def _bars(found: Explanation, sides: list[list[KernelFact]]) -> str:
    """Time of each side on one scale, kernel by kernel."""
    longest = max(sum(k.seconds(found.gpu) for k in side) for side in sides) or 1.0
    bars = []
    for name, side in zip(("before", "after"), sides, strict=True):
        spent = sum(k.seconds(found.gpu) for k in side)
        x, parts = 0.0, []
        for k in side:
            width = 1000 * k.seconds(found.gpu) / longest
            label = escape(f"{k.name}: {duration(k.seconds(found.gpu))}")
            parts.append(
                f'<rect class="{k.kind}" x="{x:.2f}" y="0" width="{max(width, 0.4):.2f}" '
                f'height="18"><title>{label}</title></rect>'
            )
            x += width
        bars.append(
            f'<div class="bar"><span>{name}</span><svg viewBox="0 0 1000 18" '
            f'preserveAspectRatio="none" role="img" aria-label="{name}: {duration(spent)}">'
            f"{''.join(parts)}</svg><span>{len(side)} kernels, {duration(spent)}</span></div>"
        )
    return "".join(bars)


def _operation(found: Explanation, k: KernelFact) -> str:
    """A kernel of PyTorch: a small box."""
    size = f"<small>{_size(k)}</small>" if k.size else ""
    return (
        f'<span class="box {k.kind}" title="{_cost(found, k)}">{escape(k.name.strip("_"))}'
        f"{size}<small>{amount(k.bytes)}</small></span>"
    )


def _kernel(found: Explanation, k: KernelFact) -> str:
    """A kernel of a Plan: what it contracts, and attached to it what it computes."""
    lines = "".join(
        f"<div><b>{escape(name)}</b>{' = ' if name else ''}{escape(formula)}</div>"
        for name, formula in k.formulas
    )
    if k.kind == GEMM:
        head = f"{_size(k)} <code>{escape(k.heading)}</code>"
    else:
        head = f"writes <code>{escape(', '.join(k.writes) or k.name)}</code>"
    brief = f'<div class="brief">{escape(_brief(k))}</div>' if _brief(k) else ""
    title = _ROLE.get(k.role, k.role)
    attached = "epilogue" if k.kind == GEMM else "computes"
    return (
        f'<details class="card {k.kind}"><summary><strong>{title}</strong> {head}'
        f'<span class="cost">{_cost(found, k)}</span>'
        f"{brief}</summary>"
        f'<div class="formulas" aria-label="{attached}">{lines}</div></details>'
    )


def _brief(k: KernelFact) -> str:
    """The operations of an epilogue, or the one short formula of another kernel."""
    if k.kind != GEMM:
        name, formula = k.formulas[0] if len(k.formulas) == 1 else ("", "")
        text = f"{name} = {formula}" if name else formula
        return text if len(text) <= _BRIEF else ""
    formulas = " ".join(f for _, f in k.formulas)
    named = ", ".join(label for op, label in _SEEN.items() if op in formulas)
    return f"epilogue: {named}" if named else "no epilogue"


_BRIEF = 120
#: What is worth naming when it is part of a formula.
_SEEN = {
    "rotate(": "RoPE", "sigmoid(": "SiLU", "erf(": "GELU", "tanh(": "tanh", "rowsum(": "row sums",
    "colsum(": "column sums", "group_sum(": "head norms", " * ": "scales", " + ": "additions",
}  # fmt: skip


def _size(k: KernelFact) -> str:
    return " × ".join(map(str, k.size)) if k.size else ""


def _cost(found: Explanation, k: KernelFact) -> str:
    return f"{amount(k.bytes)}, {duration(k.seconds(found.gpu))}"


def legend() -> str:
    """What the colours mean."""
    names = {"gemm": "GEMM", "memory": "bound by memory traffic", "attention": "attention"}
    return "".join(f'<span class="box {k}">{names[k]}</span>' for k in KINDS)


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; cells are HTML, the first column text and the others numbers."""
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    body = "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
