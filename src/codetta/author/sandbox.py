"""Foreign kernels, ``run(a, b, **operands)`` in somebody's Python file, judged and timed.

``run`` gets a (m, k), b (k, n) and the task's operands by name, and returns the task's outputs: a
tensor, a tuple in their order, or a dict. It runs in a process of its own, see :mod:`.foreign`.

What makes a kernel look right or fast without being so, and what is done about it:

=====================  ============================================================================
outputs kept           every call has new contents; some in the same memory as before, some that
                       differ from the call before in a few elements only
expected values used   they exist in the parent alone, as does the seed
memory of others read  the allocator's memory is filled with NaN before each call
late work              outputs are read as the call returns and again later; threads counted
inputs changed         their digests are compared with the parent's, their versions by the child
outputs not new        they must share no memory with inputs, earlier outputs or each other
lazy tensors           ``type(out) is torch.Tensor``, with memory of its own
library products       the operators it calls are recorded in some calls, not told which
special sizes          sizes are fuzzed on top of those asked for
patched clocks         clocks are bound before the file is imported, and checked by the parent's
loose tolerances       the judge and its budget are those of ``codetta verify``
=====================  ============================================================================
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codetta.author import oracle
from codetta.author.calls import expected_shapes
from codetta.author.cases import columns
from codetta.author.draws import Case, Inputs, drawn, generator, inputs
from codetta.author.foreign import Answer, Caught, Foreign
from codetta.author.integrity import fingerprint
from codetta.author.judge import judge
from codetta.author.report import Stage, TensorError
from codetta.author.task import Task, Workload

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "matmul", "linear", "einsum",
             "convolution", "_scaled_mm", "_grouped_mm", "_int_mm")  # fmt: skip
_LARGE = 1 << 20  # elements of an output above which some rows are judged, and calls are few
_ROWS, _CALLS = 64, 10
_SLACK_S = 0.02  # of the parent's clock: scheduling, pipes
_TILE = (128, 128)


@dataclass(frozen=True)
class ForeignRun:
    """Stages (a failed one is the last) and, if all passed, milliseconds by str(workload)."""

    stages: tuple[Stage, ...]
    times_ms: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(s.verdict == "passed" for s in self.stages)


def run_foreign(
    path: str | Path,
    task: Task,
    workloads: Sequence[Workload],
    *,
    seed: int,
    device: str = "cpu",
    rounds: int = 0,
    timeout_s: float = 120.0,
    kernel: bool = True,
    gradient: bool = False,
) -> ForeignRun:
    """Run ``run(a, b, **operands)`` of a file in a process of its own and judge what comes back.

    Args:
        workloads: each is verified on fresh inputs; then timed ``rounds`` times, on fresh inputs
            (10 times at most where they are large).
        device: "cpu" or "cuda".
        kernel: it claims to be a kernel: products by the library (torch.matmul, ...) are refused.
        gradient: its outputs must be differentiable, as the task's are.
    """
    before = fingerprint()
    session = _Session(task, seed, device, kernel, gradient and task.gradient)
    stage = "start"
    try:
        with Foreign(path, device=device, timeout_s=timeout_s) as foreign:
            stages, times = [Stage(name="start", verdict="passed")], {}
            stage = "verify"
            count = session.verify(foreign, workloads)
            stages.append(Stage(name="verify", verdict="passed", facts={"calls": count}))
            stage = "time"
            if rounds:
                times = session.time(foreign, workloads, rounds)
                stages.append(Stage(name="time", verdict="passed", facts={"rounds": rounds}))
        if fingerprint() != before:
            raise Caught("harness", "files of the harness changed while it ran")
    except Caught as caught:
        return ForeignRun((_failed(stage, caught, session.worst),))
    return ForeignRun(tuple(stages), times)


def _failed(stage: str, caught: Caught, worst: tuple[TensorError, ...]) -> Stage:
    shown = worst if caught.guard == "values" else ()
    return Stage(
        name=stage, verdict="failed", reason=caught.reason, facts={"guard": caught.guard},
        worst=shown,
    )  # fmt: skip


@dataclass
class _Session:
    task: Task
    seed: int
    device: str
    kernel: bool
    gradient: bool
    worst: tuple[TensorError, ...] = ()

    # ---- right or wrong
    def verify(self, foreign: Foreign, workloads: Sequence[Workload]) -> int:
        """Calls of all kinds at all sizes, in an order of the seed's; how many there were."""
        rng = random.Random(f"{self.seed}/foreign")
        plan = [(w, i) for i, w in enumerate((*workloads, *self._fuzzed(rng, workloads)))]
        rng.shuffle(plan)
        calls = 0
        for w, i in plan:
            case = Case(f"foreign/{i}", _smaller(w))
            x = inputs(self.task, case, self.seed)
            series: list[tuple[Inputs, dict[str, Any]]] = [
                (x, {}),
                (self._other(x, case, rng), {"reuse": True}),
            ]
            series += [(_twin(x), {}), (inputs(self.task, case, self.seed + 1), {"pause_s": 0.05})]
            spied = rng.randrange(len(series))
            for j, (given, options) in enumerate(series):
                calls += 1
                self._one(foreign, given, spy=j == spied, **options)
            if self.gradient:
                calls += 1
                self._gradients(foreign, case, x)
        return calls

    def _fuzzed(self, rng: random.Random, workloads: Sequence[Workload]) -> list[Workload]:
        dtypes = sorted({w.dtype for w in workloads})
        return [
            Workload(rng.choice((1, 3, 37)), columns(self.task, rng.choice((8, 24, 56))),
                     rng.choice((5, 16, 33)), rng.choice(dtypes))
            for _ in range(3)
        ]  # fmt: skip

    def _other(self, x: Inputs, case: Case, rng: random.Random) -> Inputs:
        return inputs(self.task, replace(case, name=f"{case.name}/other"), self.seed)

    def _one(self, foreign: Foreign, x: Inputs, **options: Any) -> Answer:
        answer = foreign.call(x, expected_shapes(self.task, x), **options)
        products = [u for u in answer.used if u.rpartition("::")[2] in _PRODUCTS]
        if self.kernel and products:
            raise Caught("products", f"it claims to be a kernel and calls {products[0]}")
        self._judge(answer.outputs, oracle.outputs(self.task, x, self.seed))
        return answer

    def _judge(self, made: dict[str, Tensor], bounds: dict[str, oracle.Bound]) -> None:
        judged = [judge(name, made[name], bounds[name], _TILE) for name in made]
        wrong = sorted((j for j in judged if j.reason), key=lambda j: -j.error.ratio)
        if wrong:
            self.worst = tuple(j.error for j in wrong[:3])
            raise Caught("values", wrong[0].reason)

    def _gradients(self, foreign: Foreign, case: Case, x: Inputs) -> None:
        shapes = expected_shapes(self.task, x)

        def upstream(i: int) -> dict[str, Tensor]:
            g = generator(self.seed, f"upstream {i} of {case.name}")
            return {n: torch.randn(s, generator=g).to(d) for n, (s, d) in shapes.items()}

        names = oracle.wanted(self.task)
        answer = foreign.call(x, shapes, upstream=upstream(0), wanted=names)
        bounds = oracle.gradients(self.task, x, upstream, self.seed)
        self._judge(
            {f"gradient of {n}": t for n, t in answer.gradients.items()},
            {f"gradient of {n}": b for n, b in bounds.items()},
        )

    # ---- how fast
    def time(
        self, foreign: Foreign, workloads: Sequence[Workload], rounds: int
    ) -> dict[str, tuple[float, ...]]:
        """Milliseconds by workload; sizes in a new order every round, each call on new inputs."""
        rng = random.Random(f"{self.seed}/time")
        found: dict[str, list[Answer]] = {str(w): [] for w in workloads}
        for i in range(rounds):
            for w in rng.sample(list(workloads), len(workloads)):
                if w.m * w.n > _LARGE and i >= _CALLS:
                    continue
                a, b, operands = drawn(self.task, w, self.seed + 1000 + i, self.device)
                x = Inputs(a, b, operands).map(lambda _, t: t.cpu())
                answer = foreign.call(x, expected_shapes(self.task, x))
                found[str(w)].append(answer)
                if rng.random() < 0.25 or not i:
                    self._sampled(answer, x, rng)
        for answers in found.values():
            _clocks_agree(answers)
        return {name: tuple(a.said_s * 1e3 for a in answers) for name, answers in found.items()}

    def _sampled(self, answer: Answer, x: Inputs, rng: random.Random) -> None:
        """Some rows of the outputs that were timed; all, if the outputs are small."""
        m = x.a.shape[0]
        if m * x.b.shape[1] <= _LARGE:
            self._judge(answer.outputs, oracle.outputs(self.task, x, self.seed))
            return
        picked = torch.tensor(sorted(rng.sample(range(m), min(m, _ROWS))))
        rows = {o.name for o in self.task.operands if o.kind in ("tile", "col", "index")}
        operands: dict[str, Any] = {}
        for name, value in x.operands.items():
            if isinstance(value, tuple):
                operands[name] = (value[0], value[1][picked])
            else:
                operands[name] = value[picked] if name in rows else value
        some = Inputs(x.a[picked], x.b, operands)
        local = [o.name for o in self.task.outputs if o.kind in ("tile", "col")]
        bounds = oracle.outputs(self.task, some, self.seed)
        self._judge({n: answer.outputs[n][picked] for n in local}, bounds)


def _smaller(w: Workload) -> Workload:
    """Few enough rows to judge all of them in fp64."""
    return replace(w, m=min(w.m, max(1, _LARGE // max(w.n, 1))))


def _twin(x: Inputs) -> Inputs:
    """Inputs that differ from x in the middle of a alone: its corners tell nothing."""
    a = x.a.clone()
    m, k = a.shape
    a[m // 2, : max(1, k // 2)] = -a[m // 2, : max(1, k // 2)] * 0.5
    return replace(x, a=a)


def _clocks_agree(answers: Sequence[Answer]) -> None:
    """A clock that says much less than the parent's, every time, is not believed."""
    lying = [a for a in answers if a.said_s < a.wall_s / 2 - _SLACK_S]
    if answers and len(lying) == len(answers):
        a = lying[0]
        reason = f"its clock says {a.said_s * 1e3:.3g} ms, the parent's {a.wall_s * 1e3:.3g} ms"
        raise Caught("clock", reason)
