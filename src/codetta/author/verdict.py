"""From times to a verdict: faster, slower, noise, or not to be believed.

All contenders but a foreign kernel were timed in the same rounds. The candidate is set against the
fastest of its rivals by the median of the ratios within a round, with a bootstrap interval; if that
holds 1, the verdict is noise, however the medians lie. A time below the roofline's floor is a
broken measurement and no achievement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from codetta.author.report import Verdict
from codetta.tuning.comparison import interval, ratio, unpaired

CANDIDATE, PLAIN, AGAINST = "candidate", "plain", "against"
#: What the candidate must beat; the plain product is what it cannot be expected to.
RIVALS = ("eager", "compile", "recorded", AGAINST)
_SUSPICIOUS = 10.0
_PROFILE = "`codetta profile` says what limits it"


class Judged(NamedTuple):
    """``words``: faster, slower, noise or implausible, with numbers."""

    verdict: Verdict
    words: str
    fix: str
    facts: dict[str, Any]


def judge(times: Mapping[str, Sequence[float]], floor_ms: float) -> Judged:
    """The verdict on times in milliseconds by contender, one a round, rounds in the same order.

    Args:
        floor_ms: what no kernel can go below, see :func:`codetta.author.estimate.floor_ms`.
    """
    facts: dict[str, Any] = {"rounds": len(times[CANDIDATE]), "floor_ms": floor_ms}
    believed: dict[str, Sequence[float]] = {}
    for name, ms in times.items():
        median, low, high = interval(ms)
        facts |= {f"{name}_ms": median, f"{name}_ms_low": low, f"{name}_ms_high": high}
        if median >= floor_ms:
            believed[name] = ms
        else:
            facts[f"{name}_note"] = f"below the floor of {floor_ms:.4g} ms: not believed"
    for name in believed:
        if name != CANDIDATE and CANDIDATE in believed:
            # A foreign kernel is timed in a process of its own, so its rounds are others.
            compare = unpaired if name == AGAINST else ratio
            found = compare(times[CANDIDATE], times[name])
            facts |= {f"over_{name}": found.median}
            facts |= {f"over_{name}_low": found.low, f"over_{name}_high": found.high}
    return _verdict(believed, facts, floor_ms)


def _verdict(
    believed: Mapping[str, Sequence[float]], facts: dict[str, Any], floor_ms: float
) -> Judged:
    rivals = [name for name in RIVALS if name in believed]
    if CANDIDATE not in believed:
        words = (
            f"implausible: {facts['candidate_ms']:.4g} ms is less than the {floor_ms:.4g} ms that "
            "the task's bytes and products take at the GPU's peak"
        )
        fix = "time it again; if it stays, the timing is broken and should be reported"
        return Judged("failed", words, fix, facts | {"verdict": "implausible"})
    if not rivals:
        words = "there is no rival to compare with"
        return Judged("noise", words, "", facts | {"verdict": "noise"})
    rival = min(rivals, key=lambda name: facts[f"{name}_ms"])
    middle, low, high = (facts[f"over_{rival}{end}"] for end in ("", "_low", "_high"))
    facts |= {"rival": rival}
    if "over_eager" in facts and facts["over_eager"] < 1 / _SUSPICIOUS:
        facts["flagged"] = f"{1 / facts['over_eager']:.3g} times faster than eager: look twice"
    span = f"{middle:.3f} times the time of {rival} ({low:.3f} to {high:.3f})"
    if high < 1:
        return Judged("passed", f"faster: {span}", "", facts | {"verdict": "faster"})
    if low > 1:
        return Judged("failed", f"slower: {span}", _PROFILE, facts | {"verdict": "slower"})
    words = f"noise: {span}, no difference is shown"
    return Judged("noise", words, _PROFILE, facts | {"verdict": "noise"})
