"""``codetta.tune``: measure configurations for the kernels of a call, and remember the winners.

The function to tune runs once, and what it launches is written down; each kernel is then searched
on random data of the same shapes, dtypes and layouts. Winners go to the user's cache
(:mod:`codetta.backends.cuda.config_cache`), and calls from then on use them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codetta.backends.cuda import config_cache
from codetta.backends.cuda.available import unavailable
from codetta.backends.cuda.config_cache import canonical
from codetta.backends.cuda.configs import Configuration, choose, recording
from codetta.backends.cuda.forms import Lowered
from codetta.backends.cuda.lowering import lower
from codetta.errors import BackendUnavailable, NothingToTune
from codetta.language.program import Program
from codetta.tuning.search import Candidate, search
from codetta.tuning.space import DTYPES, Problem, arrays, configurations
from codetta.tuning.timing import GpuTimer, Measure
from codetta.tuning.workers import Job, Statics, compile_all

_COMPILING = 0.6  # share of the budget for compiling

#: Called with a line of progress: what happens, how much of it is done, and the best so far.
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Tuned:
    """The outcome for one kernel.

    Attributes:
        problem: program, M, N, K, layout and dtypes.
        config: the fastest configuration; ``ms`` its median time.
        default: what the kernel would have got, and ``default_ms`` its time if it was measured.
        plain_ms: a @ b by cuBLAS, of the same shape.
        tried: how many configurations were measured.
    """

    problem: Problem
    config: Configuration
    ms: float
    default: Configuration
    default_ms: float | None
    plain_ms: float
    tried: int
    file: Path | None

    @property
    def code(self) -> str:
        """How to hard-code the winner."""
        return f"with codetta.use_configuration(codetta.{self.config.code}): ..."

    def __str__(self) -> str:
        p = self.problem
        before = "" if self.default_ms is None else f", {self.default} {self.default_ms:.4g} ms"
        return (
            f"{p.m} x {p.n} x {p.k} {p.layout}: {self.config} {self.ms:.4g} ms{before}, "
            f"cuBLAS {self.plain_ms:.4g} ms\n  {self.code}"
        )


def tune(
    what: Program | Callable[..., Any],
    *args: Any,
    budget_s: float = 60.0,
    progress: Progress | None = None,
    **named: Any,
) -> tuple[Tuned, ...]:
    """Search configurations for the GEMM kernels of a call on this GPU, and keep the winners.

        codetta.tune(residual_ssq, a, w.t(), residual=r)       # a program, as for codetta.gemm
        codetta.tune(lambda: model(tokens).sum().backward())   # every kernel of a step

    Args:
        what: a Program, called as ``codetta.gemm(a, b, what, **operands)``, or any callable; it is
            called once, with ``args`` and ``named``.
        budget_s: seconds for compiling and measuring; what it does not reach is left out.
        progress: called with a line of text and the share that is done.

    Returns:
        One :class:`Tuned` per kernel, largest GEMM first. Results also go to the user's cache.

    Raises:
        BackendUnavailable: there is no GPU that the fused kernels run on.
        NothingToTune: the call launches no fused GEMM kernel.
    """
    problem = unavailable()
    if problem is not None:
        raise BackendUnavailable(given="cuda", reason=problem[0], fix=problem[1])
    return tuned(kernels_of(what, args, named), budget_s, progress)


def kernels_of(
    what: Program | Callable[..., Any], args: Sequence[Any], named: dict[str, Any]
) -> list[Problem]:
    """The GEMM kernels that a call launches, each once."""
    from codetta.backends.cuda.launch import CUDA
    from codetta.functional import gemm

    found: dict[Problem, None] = {}

    def note(lowered: Lowered, m: int, n: int, k: int, layout: str, operands: Any) -> None:
        problem = _problem(lowered, m, n, k, layout, operands)
        if problem is not None:
            found[problem] = None

    CUDA.forget()  # so that every kernel is chosen anew, and seen
    with recording(note):
        if isinstance(what, Program):
            a, b = args
            gemm(a, b, what, **named)
        else:
            what(*args, **named)
    if not found:
        raise NothingToTune(what=getattr(what, "name", None) or getattr(what, "__name__", "call"))
    return sorted(found, key=lambda p: -p.m * p.n * p.k)


def _problem(
    lowered: Lowered, m: int, n: int, k: int, layout: str, operands: Sequence[Tensor]
) -> Problem | None:
    names = {dtype: name for name, dtype in DTYPES.items()}
    if lowered.operand not in DTYPES or any(x.dtype not in names for x in operands):
        return None
    dtypes = tuple(names[x.dtype] for x in operands)
    return Problem(canonical(lowered.program), m, n, k, layout, lowered.operand, dtypes)


def tuned(
    problems: Sequence[Problem],
    budget_s: float = 60.0,
    progress: Progress | None = None,
    *,
    device: torch.device | None = None,
    measure: Measure | None = None,
) -> tuple[Tuned, ...]:
    """Search for each problem and store what won; see :func:`tune`."""
    from codetta.backends.cuda.launch import CUDA

    say = progress or (lambda text, share: None)
    device = device or torch.device("cuda", torch.cuda.current_device())
    measure = measure or GpuTimer(device)
    begun = time.monotonic()

    def late(share: float = 1.0) -> bool:
        return time.monotonic() - begun > budget_s * share

    jobs = {p: [Job(p, c) for c in configurations(lower(p.program, p.operand))] for p in problems}
    statics = compile_all(
        _in_turn(list(jobs.values())),
        _kernel_folder(),
        done=lambda n, total: say(f"compiled {n} of {total} kernels", _COMPILING * n / total),
        deadline=lambda: late(_COMPILING),
    )
    found: list[Tuned] = []
    with torch.no_grad():
        for i, (problem, asked) in enumerate(jobs.items()):
            if late() and found:
                break
            known = [(j.config, statics[j.key]) for j in asked if j.key in statics]
            result = _one(problem, known, device, measure, late)
            if result is not None:
                found.append(result)
                share = _COMPILING + (1 - _COMPILING) * (i + 1) / len(jobs)
                say(f"{result.config} {result.ms:.4g} ms for {problem.name}", share)
    CUDA.forget()
    return tuple(found)


def _kernel_folder() -> Path:
    from codetta.backends.cuda import quack

    return Path(quack.cache_folder())


def _in_turn(lists: Sequence[Sequence[Job]]) -> list[Job]:
    """Jobs of all kernels by turns, so that a short budget reaches each of them."""
    longest = max((len(x) for x in lists), default=0)
    return [x[i] for i in range(longest) for x in lists if i < len(x)]


def _one(
    problem: Problem,
    known: Sequence[tuple[Configuration, Statics]],
    device: torch.device,
    measure: Measure,
    late: Callable[[], bool],
) -> Tuned | None:
    a, b, operands = arrays(problem, device)
    lowered = lower(problem.program, problem.operand)
    index = device.index
    default = choose(lowered, problem.m, problem.n, problem.k, problem.layout, device=None)
    found = search(
        problem, (a, b, operands), known, measure, others={"plain": lambda: a @ b}, late=late
    )
    best = found.best
    if best is None or best.times is None or default is None:
        return None
    key = config_cache.key_of(
        lowered, problem.m, problem.n, problem.k, problem.layout, operands,
        config_cache.machine(index) if index is not None else {},
    )  # fmt: skip
    date = time.strftime("%Y-%m-%d")
    file = config_cache.save(key, best.config, best.times.median, date)
    measured = [c for c in found.candidates if c.times is not None]
    return Tuned(
        problem, best.config, best.times.median, default, _time_of(measured, default),
        found.others["plain"].median, len(measured), file,
    )  # fmt: skip


def _time_of(candidates: Sequence[Candidate], config: Configuration) -> float | None:
    same = (c for c in candidates if c.config.data() == config.data())
    return next((c.times.median for c in same if c.times is not None), None)
