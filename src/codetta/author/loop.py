"""``codetta author``: a language model writes, the tools judge, the report goes back.

A round is an answer and what the tools make of it: check, verify, then bench, each only if the one
before it passed. The best verified program is kept. Everything is in the trace before the next
thing happens, so an interrupted run goes on where it was, and a finished one can be audited: the
conversation is a function of the trace, and every round names its hash.

What a model writes is executed nowhere but in the process of its own that
:func:`codetta.author.candidate.load_candidate` makes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from codetta.author import prompt
from codetta.author.client import Answer, Message
from codetta.author.judgement import Judgement, judgement
from codetta.author.trace import Event, Trace
from codetta.errors import EndpointFailed

#: Times the plain product's time: what counts as fast.
GOAL = 1.08
_GAIN = 0.01  # less than that is none
_PATIENCE = 2  # rounds without a gain
_KEPT = 3  # answers that a model is shown again,
_REPEATED = 1 << 16  # and this many characters of each
Until = Literal["fast", "verified"]
Judge = Callable[[Path, str, int], Judgement]


class Asks(Protocol):
    def ask(
        self, messages: list[Message], *, timeout_s: float, max_tokens: int | None = None
    ) -> Answer: ...


@dataclass(frozen=True)
class Limits:
    """When to stop at the latest.

    Attributes:
        rounds: answers that are judged.
        budget_s: seconds for everything, rounds of earlier runs of the same trace included.
        max_tokens: of an answer; the endpoint's own limit by default.
        timeout_s: for one request, with all its attempts.
        until: "verified" stops at the first program that is right, "fast" goes on until one takes
            at most :data:`GOAL` times the plain product's time.
    """

    rounds: int = 8
    budget_s: float = 1800.0
    max_tokens: int | None = None
    timeout_s: float = 600.0
    until: Until = "fast"


def begin(folder: str | Path, task: str, model: str, url: str, seed: int) -> Trace:
    """A new trace, with all that the model will be told before its first answer."""
    if task.endswith(".py"):
        task = str(Path(task).resolve())  # the trace may be resumed from another folder
    return Trace.create(
        folder,
        {
            "task": task, "model": model, "url": url, "seed": seed,
            "system": prompt.system(), "task_text": prompt.task_text(task),
            "environment": _environment(),
        },
    )  # fmt: skip


def run(
    model: Asks,
    trace: Trace,
    limits: Limits,
    *,
    judge: Judge | None = None,
    seen: Callable[[Event], None] = lambda event: None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Go on with a trace until it is to stop; what came of it.

    Args:
        judge: (file, task, seed) -> what the tools say.
        seen: told every event as it is written.

    Raises:
        EndpointFailed: the model cannot be reached, and no program has been verified yet.
    """
    began = time.monotonic()
    spent = sum(e["elapsed_s"] for e in trace.of("answer") + trace.of("verdict"))
    judge = judge or (lambda path, task, seed: judgement(path, task, seed, GOAL, progress))
    trace.add("settings", **vars(limits))
    stop, failure = "", None
    while not stop:
        left = limits.budget_s - spent - (time.monotonic() - began)
        answers, judged = trace.of("answer"), trace.of("verdict")
        if len(judged) < len(answers):
            progress(f"round {len(answers)}: judging")
            seen(_judge(trace, answers[-1], judge))
            _keep(trace)
            continue
        if stop := stopped(judged, limits, left):
            break
        number = len(answers) + 1
        progress(f"round {number}: waiting for an answer")
        try:
            _ask(model, trace, number, limits, left)
        except TimeoutError as error:
            seen(trace.add("no_answer", round=number, reason=str(error)))
            stop = "budget" if left <= limits.timeout_s else "timeout"
        except EndpointFailed as error:
            failure, stop = error, "endpoint"
            seen(trace.add("no_answer", round=number, reason=str(error)))
    summary = summarize(trace, stop, spent + time.monotonic() - began)
    trace.add("stop", **summary)
    trace.write("summary.json", json.dumps(summary, indent=2) + "\n")
    if failure is not None and summary["best"] is None:
        raise failure
    return summary


def stopped(judged: list[Event], limits: Limits, left_s: float) -> str:
    """Why to ask no more, or ""."""
    best = best_of(judged)
    if best is not None and (limits.until == "verified" or best["ratio"] is None):
        return "verified"
    if best is not None and best["ratio"] <= GOAL:
        return "fast"
    if best is not None and _settled(judged):
        return "converged"
    recent = [e["code_sha256"] for e in judged[-3:]]
    if len(recent) == 3 and recent[0] and len(set(recent)) == 1:
        return "stuck"
    if len(judged) >= limits.rounds:
        return "rounds"
    return "budget" if left_s <= 0 else ""


def _settled(judged: list[Event]) -> bool:
    """Whether a verified program was repeated, or the last rounds gained nothing."""
    last, before = judged[-1], judged[:-1]
    programs = [e["program_sha256"] for e in before if e["outcome"] == "passed"]
    if last["outcome"] == "passed" and last["program_sha256"] in programs:
        return True
    earlier = best_of(judged[:-_PATIENCE])
    now = best_of(judged)
    if earlier is None or now is None:
        return False
    return bool(now["ratio"] > earlier["ratio"] * (1 - _GAIN))


def best_of(judged: list[Event]) -> Event | None:
    """The verified round with the least time over the plain product's."""
    right = [e for e in judged if e["outcome"] == "passed"]
    return min(right, key=lambda e: e["ratio"] or 0.0) if right else None


# -------------------------------------------------------------------------------- one round
def conversation(trace: Trace) -> list[Message]:
    """What the next request says: rules, task, and the last answers with what came of them."""
    told: list[Message] = [
        {"role": "system", "content": trace.start["system"]},
        {"role": "user", "content": trace.start["task_text"]},
    ]
    for answer, verdict in list(zip(trace.of("answer"), trace.of("verdict"), strict=True))[-_KEPT:]:
        # An endpoint may refuse an empty message.
        told.append({"role": "assistant", "content": answer["text"][:_REPEATED] or "(no answer)"})
        told.append({"role": "user", "content": verdict["feedback"]})
    return told


def _ask(model: Asks, trace: Trace, number: int, limits: Limits, left_s: float) -> None:
    messages = conversation(trace)
    began = time.monotonic()
    answer = model.ask(
        messages, timeout_s=min(limits.timeout_s, left_s), max_tokens=limits.max_tokens
    )
    trace.add(
        "answer", round=number, messages=len(messages), prompt_sha256=sha256(json.dumps(messages)),
        text=answer.text, finish=answer.finish, model=answer.model, usage=dict(answer.usage),
        failures=list(answer.failures), elapsed_s=round(time.monotonic() - began, 3),
    )  # fmt: skip


def _judge(trace: Trace, answer: Event, judge: Judge) -> Event:
    number, began = answer["round"], time.monotonic()
    code, reason = prompt.code_of(answer["text"], cut=answer["finish"] == "length")
    path = trace.code(number)
    if reason:
        found = Judgement("no code", prompt.unreadable(reason), reason=reason)
    else:
        path.write_text(code, encoding="utf-8")
        found = judge(path, trace.start["task"], trace.start["seed"] + number)
    return trace.add(
        "verdict", round=number, outcome=found.outcome, reason=found.reason, ratio=found.ratio,
        feedback=found.feedback, code_sha256=sha256(code) if code else "",
        program_sha256=found.program_sha256,
        reports=[json.loads(r.model_dump_json()) for r in found.reports],
        elapsed_s=round(time.monotonic() - began, 3),
    )  # fmt: skip


def _keep(trace: Trace) -> None:
    """Write the best program so far to best.py."""
    best = best_of(trace.of("verdict"))
    if best is not None:
        trace.write("best.py", trace.code(best["round"]).read_text(encoding="utf-8"))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# ------------------------------------------------------------------------------ the summary
def summarize(trace: Trace, stop: str, elapsed_s: float) -> dict[str, Any]:
    """What came of a trace, as in summary.json."""
    judged = trace.of("verdict")
    best = best_of(judged)
    tokens: dict[str, int] = {}
    for answer in trace.of("answer"):
        for name, count in answer["usage"].items():
            tokens[name] = tokens.get(name, 0) + count
    return {
        "task": trace.start["task"],
        "model": trace.start["model"],
        "stop": stop,
        "rounds": len(judged),
        "outcomes": [e["outcome"] for e in judged],
        "verified_at_first_verify": next(_first_verify(judged), None),
        "best": best
        and {
            "round": best["round"],
            "file": str(trace.folder / "best.py"),
            "ratio": best["ratio"],
            "code_sha256": best["code_sha256"],
            "program_sha256": best["program_sha256"],
        },
        "tokens": tokens,
        "elapsed_s": round(elapsed_s, 2),
    }


def _first_verify(judged: list[Event]) -> Iterator[bool]:
    """Whether the first program that came as far as verify passed it."""
    for event in judged:
        for report in event["reports"]:
            if report["command"] == "verify":
                yield all(s["verdict"] != "failed" for s in report["stages"])


def _environment() -> Mapping[str, str]:
    from codetta.author.surroundings import environment

    return environment()
