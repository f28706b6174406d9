"""The loss curves of the demo as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from codetta.demo.judge import LossStep
from codetta.demo.train import Run
from codetta.errors import MissingPackage

_COLOURS = ("#8a8f98", "#1f5f8b", "#d1495b")  # the last run is CODA's


def save_figure(
    path: Path, runs: Sequence[Run], deviations: Sequence[LossStep], title: str, deviation: str
) -> None:
    """Above the loss of each run; below CODA's deviation and what is allowed, on a log scale.

    Args:
        deviation: what `deviations` measure, the label of the lower axis.
    """
    try:
        # The object interface: no global state, no display.
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as error:
        raise MissingPackage(
            what="the figure of codetta demo",
            package="matplotlib",
            given="not installed",
            fix="pip install 'codetta[demo]'",
        ) from error
    figure = Figure(figsize=(8, 6), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))

    steps = range(1, len(runs[0].losses) + 1)
    for run, colour in zip(runs, _COLOURS[-len(runs) :], strict=True):
        if run is runs[-1]:  # markers only: the curves lie on top of each other
            above.plot(steps, run.losses, "o", ms=5, mfc="none", color=colour, label=run.name)
        else:
            above.plot(steps, run.losses, "-", lw=1.8, color=colour, label=run.name)
    above.set_ylabel("loss (nats per token)")
    above.set_title(title, fontsize=11)

    # An exact match has no place on a log scale: it is drawn at the lower edge.
    floor = 1e-3 * min(row.allowed for row in deviations)
    below.plot(
        steps,
        [max(row.deviation, floor) for row in deviations],
        "o-",
        ms=4,
        lw=1,
        color=_COLOURS[-1],
        label=runs[-1].name,
    )
    below.plot(
        steps, [row.allowed for row in deviations], "--", color="black", lw=1, label="allowed"
    )
    below.set_yscale("log")
    below.set_ylabel(deviation)
    below.set_xlabel("step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
