"""tune_pointwise.py without a GPU: what it finds in a step, and the cuts that it tries."""

import pytest
import torch
import tune_pointwise
from helpers.fused import running

import codetta.capture.call
import codetta.capture.pack  # noqa: F401
from codetta.backends.cuda.triton_stages import cut
from codetta.tuning.timing import Times


@pytest.fixture(scope="module")
def calls():
    with running("emulated"):
        return tune_pointwise.calls("tiny-qwen3")


def test_the_step_s_programs_without_a_product_are_found_once(calls):
    texts = [c.program.text for c in calls]
    assert len(set(texts)) == len(texts) > 3
    assert any("rotate" in t and "group_sum" in t for t in texts)  # of the q and k norms
    assert all(not c.program.has_acc and len(c.operands) > 0 for c in calls)


def test_the_rule_s_cut_comes_first_and_all_cover_whole_chunks(calls):
    for call in calls:
        found = tune_pointwise.cuts(call.task, call.n, call.tile)
        assert found[0] == cut(call.task, call.n, call.tile)
        assert len(set(found)) == len(found) > 1
        for c in found:
            assert c.chunk_rows % c.rows == 0 and (c.pieces, c.piece) == (
                found[0].pieces, found[0].piece,
            )  # fmt: skip
            if c.by_columns:  # the loop does not reach other rows
                assert c.chunk_rows == c.rows
            elif call.raw and call.task.folded:  # partials are one per tile of the language
                assert c.chunk_rows == found[0].chunk_rows


def made_up(monkeypatch, results):
    """Each cut gives the next of ``results``."""
    given = iter(results)

    def launch(*unused):
        result = next(given)
        return lambda: [result]

    monkeypatch.setattr(tune_pointwise, "_launch", launch)


def test_cuts_with_another_result_are_not_timed(calls, monkeypatch):
    call = max(calls, key=lambda c: len(tune_pointwise.cuts(c.task, c.n, c.tile)))
    count = len(tune_pointwise.cuts(call.task, call.n, call.tile))
    wrong = [torch.full((4,), 2.0 if i == 1 else 1.0) for i in range(count)]
    made_up(monkeypatch, wrong)
    ms = iter(range(count, 0, -1))
    found = tune_pointwise.times(call, lambda runs, n: {x: Times([next(ms)]) for x in runs})
    assert list(found["failed"].values()) == ["another result"]
    assert len(found["cuts"]) == count - 1 and found["rule"] == found["cuts"][-1]["name"]
    shown = tune_pointwise.table(found)
    assert shown.count("(rule)") == 1 and "MB" in shown
