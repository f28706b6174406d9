"""Which calls a verification makes. They follow from task and seed, so any of them can be repeated
by its name."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from codetta.author.draws import Case
from codetta.author.layouts import LAYOUTS
from codetta.author.special import SPECIAL
from codetta.author.task import Task, Workload
from codetta.errors import UnknownCase

#: Stages that make calls, in the order in which they run.
STAGES = ("integers", "workloads", "fuzz", "special", "tiles", "gradients")
_ROWS = (0, 1, 7, 33, 129)
_INNER = (1, 2, 7, 8, 31, 72)
_COLUMNS = (1, 7, 8, 24, 130, 264)
_DTYPES = ("bfloat16", "float16", "float32")
_V = TypeVar("_V")


def cases(task: Task, seed: int, quick: bool = False) -> dict[str, list[Case]]:
    """By stage; ``quick`` takes fewer of each."""
    found = {
        "integers": _integers(task),
        "workloads": [Case(f"workloads/{_slug(w)}", w) for w in task.correctness],
        "fuzz": _fuzz(task, seed),
        "special": _special(task, seed),
        "tiles": _tiles(task),
        "gradients": _gradients(task, seed) if task.gradient else [],
    }
    if quick:
        found = {stage: _thinned(stage, listed) for stage, listed in found.items()}
    return found


def named_case(task: Task, seed: int, name: str) -> Case:
    """The case of that name.

    Raises:
        UnknownCase: there is none.
    """
    for listed in cases(task, seed).values():
        for case in listed:
            if case.name == name:
                return case
    raise UnknownCase(case=name, task=task.name, stages=", ".join(STAGES))


def columns(task: Task, about: int) -> int:
    """A multiple of the task's granule, at least one."""
    return max(1, round(about / task.granule)) * task.granule


def _slug(w: Workload) -> str:
    return f"{w.m}x{w.n}x{w.k}-{w.dtype}"


def _thinned(stage: str, listed: Sequence[Case]) -> list[Case]:
    """Every third; the workloads are the least there is and stay."""
    return list(listed) if stage in ("integers", "workloads") else list(listed[::3])


def _integers(task: Task) -> list[Case]:
    # Sums of 40 products of -1, 0 and 1 are exact in 16 bits, too.
    return [
        Case(f"integers/{dtype}", Workload(131, columns(task, 136), 40, dtype), values="integers")
        for dtype in ("float32", "bfloat16")
    ]


def _fuzz(task: Task, seed: int) -> list[Case]:
    """Each number of rows, of columns, each inner size, layout and dtype at least twice, in an
    order that the seed shuffles."""
    rng = random.Random(f"{seed}/fuzz")
    count = 14
    rows, inner, wide = (_deal(rng, x, count) for x in (_ROWS, _INNER, _COLUMNS))
    layouts, dtypes = _deal(rng, tuple(LAYOUTS), count), _deal(rng, _DTYPES, count)
    made = []
    for i in range(count):
        m = rows[i]
        lead: tuple[int, ...] = ()
        if i % 4 == 3:  # leading dimensions
            m = {0: 0, 1: 1}.get(m, 6)
            lead = rng.choice([(m, 1), (1, m), (2, m // 2) if m % 2 == 0 else (m, 1)])
        w = Workload(m, columns(task, wide[i]), inner[i], dtypes[i])
        made.append(Case(f"fuzz/{i:02d}", w, lead=lead, layout=layouts[i]))
    return made


def _deal(rng: random.Random, values: Sequence[_V], count: int) -> list[_V]:
    """``count`` of the values, each about equally often, in a random order."""
    dealt: list[_V] = []
    while len(dealt) < count:
        dealt += rng.sample(list(values), len(values))
    return dealt[:count]


def _special(task: Task, seed: int) -> list[Case]:
    rng = random.Random(f"{seed}/special")
    made = []
    for name in SPECIAL:
        # A shift is lost in 16 bits; tiny and huge numbers are different ones in fp16.
        dtypes = {"shifted": ("float32",), "tiny": _DTYPES, "overflow": _DTYPES}.get(
            name, (rng.choice(_DTYPES),)
        )
        for dtype in dtypes:
            w = Workload(rng.choice((9, 33)), columns(task, rng.choice((24, 136))), 8, dtype)
            made.append(Case(f"special/{name}-{dtype}", w, values=name))
    return made


def _tiles(task: Task) -> list[Case]:
    g = task.granule
    tiles = {"small": (16, -(-32 // g) * g), "odd": (48, -(-40 // g) * g),
             "whole": (256, -(-512 // g) * g)}  # fmt: skip
    w = Workload(67, columns(task, 328), 24, "float32")
    made = [Case(f"tiles/{name}", w, tile=tile) for name, tile in tiles.items()]
    # Kernels have tiles of these sizes alone, and in 16 bits.
    w = Workload(300, columns(task, 400), 64, "bfloat16")
    return [
        *made,
        *(Case(f"tiles/128x{n}", w, tile=(128, -(-n // g) * g)) for n in (128, 192)),
    ]


def _gradients(task: Task, seed: int) -> list[Case]:
    rng = random.Random(f"{seed}/gradients")
    plan = (
        (67, 136, 24, "float32", "plain"),
        (129, 264, 72, "bfloat16", "plain"),
        (1, 8, 7, "float32", "plain"),
        (33, 40, 9, "float16", rng.choice(("transposed", "offset", "spread"))),
        (7, 24, 1, "float32", rng.choice(("transposed", "pitched"))),
        (0, 24, 8, "bfloat16", "plain"),
    )
    return [
        Case(f"gradients/{i}", Workload(m, columns(task, n), k, dtype), layout=layout)
        for i, (m, n, k, dtype, layout) in enumerate(plan)
    ]
