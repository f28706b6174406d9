"""A trace is only appended to, survives a crash, and is seen to be edited."""

from __future__ import annotations

import json

import pytest

from codetta.author.trace import Trace
from codetta.errors import TraceUnusable


def made(folder):
    trace = Trace.create(folder, {"task": "bias_gelu_mask", "model": "m"})
    trace.add("answer", round=1, text="première \x1b[0m \U0001f600")
    trace.add("verdict", round=1, outcome="check")
    return trace


def test_a_resumed_trace_has_the_events_that_were_written(tmp_path):
    trace = made(tmp_path / "run")
    again = Trace.resume(tmp_path / "run")
    assert again.events == trace.events
    assert [e["kind"] for e in again.events] == ["start", "answer", "verdict"]
    assert again.start["task"] == "bias_gelu_mask"
    again.add("answer", round=2, text="more")
    assert [e["round"] for e in Trace.resume(tmp_path / "run").of("answer")] == [1, 2]


def test_an_existing_trace_is_never_begun_again(tmp_path):
    made(tmp_path)
    before = (tmp_path / "trace.jsonl").read_bytes()
    with pytest.raises(TraceUnusable, match="exists"):
        Trace.create(tmp_path, {"task": "mish"})
    assert (tmp_path / "trace.jsonl").read_bytes() == before


def test_a_line_that_a_crash_cut_short_is_left_out_and_the_chain_goes_on(tmp_path):
    made(tmp_path)
    file = tmp_path / "trace.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"kind": "answer", "rou')
    trace = Trace.resume(tmp_path)
    assert file.read_bytes() == whole
    trace.add("answer", round=2, text="x")
    assert len(Trace.resume(tmp_path).events) == 4


@pytest.mark.parametrize(
    "edit",
    [
        lambda lines: [lines[0], lines[1].replace(b"premi", b"prema"), lines[2]],
        lambda lines: [lines[0], lines[2]],
        lambda lines: [lines[0], lines[2], lines[1]],
        lambda lines: [lines[0].replace(b"bias_gelu_mask", b"mish"), *lines[1:]],
    ],
    ids=["changed", "removed", "swapped", "start changed"],
)
def test_an_edited_trace_is_refused(tmp_path, edit):
    made(tmp_path)
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b"\n".join(edit(file.read_bytes().splitlines())) + b"\n")
    with pytest.raises(TraceUnusable, match="was edited"):
        Trace.resume(tmp_path)


@pytest.mark.parametrize("text", ["", "[]\n", "no json\n", '{"kind": "start", "format": 99}\n'])
def test_what_is_no_trace_is_refused(tmp_path, text):
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(TraceUnusable):
        Trace.resume(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceUnusable, match="cannot be written"):
        Trace.create(tmp_path / "file" / "run", {})
    with pytest.raises(TraceUnusable, match="cannot be read"):
        Trace.resume(tmp_path / "nowhere")


def test_numbers_that_json_does_not_have_are_refused_before_anything_is_written(tmp_path):
    trace = made(tmp_path)
    before = (tmp_path / "trace.jsonl").read_bytes()
    with pytest.raises(ValueError, match="JSON compliant"):
        trace.add("verdict", ratio=float("nan"))
    assert (tmp_path / "trace.jsonl").read_bytes() == before
    assert json.loads(before.splitlines()[-1])["kind"] == "verdict"


def test_a_file_beside_the_trace_is_replaced_as_a_whole(tmp_path):
    trace = made(tmp_path)
    trace.write("best.py", "first")
    trace.write("best.py", "2")
    assert (tmp_path / "best.py").read_text() == "2"
    assert not list(tmp_path.glob(".*"))
