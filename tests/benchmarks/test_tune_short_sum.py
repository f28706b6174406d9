"""benchmarks/tune_short_sum.py: its records are what tune_sustained.py makes defaults of."""

from __future__ import annotations

import json

import pytest
import tune_short_sum
from sample_records import BENCHMARKS

from codetta.backends.cuda import shipped, short_sum
from codetta.backends.cuda.configs import choose

SIZE = (128256, 4096, 2048, 24)
FILE = BENCHMARKS / "results/2026-12-03-h200-4/sustained_sum24.json"


def times(*further):
    ms = {
        tune_short_sum.name(short_sum.FURTHER, c): t
        for c, t in zip(tune_short_sum.CONFIGS, further, strict=False)
    }
    return {"cublas": 2.0, "fp32 sum": 2.5} | ms


def test_the_fastest_tile_is_the_best_and_all_are_kept():
    (found,) = tune_short_sum.records(SIZE, times(2.2, 2.4, 1.9)).values()
    assert found["best"]["config"] == tune_short_sum.CONFIGS[2].data()
    assert found["best"]["median_ms"] == 1.9 and found["ratio_to_plain"] == 0.95
    assert [c["median_ms"] for c in found["candidates"]] == [1.9, 2.2, 2.4]
    assert found["best"]["spills"] == 30 and found["candidates"][1]["spills"] == 0
    assert found["beside"] == {"cublas": 2.0, "fp32 sum": 2.5}
    assert tune_short_sum.records(SIZE, {"cublas": 2.0}) == {}


def test_a_record_becomes_a_default_of_its_family():
    (record,) = tune_short_sum.records(SIZE, times(2.2, 2.4, 1.9)).values()
    text = shipped.merged(shipped.FILE.read_text(), [({"date": "2000-01-01"}, record)])
    (entry,) = (e for e in json.loads(text)["entries"] if e["date"] == "2000-01-01")
    assert entry["family"] == "element load2 store2" and entry["ms"] == 1.9


@pytest.mark.parametrize("name", json.loads(FILE.read_text())["kernels"])
def test_what_was_measured_is_what_is_chosen(name):
    record = json.loads(FILE.read_text())["kernels"][name]
    lowered = short_sum.lowered_sum(short_sum.FURTHER, "bf16", 24)
    chosen = choose(lowered, record["m"], record["n"], record["k"], "tn")
    assert chosen is not None and chosen.data() == record["best"]["config"]


def test_sums_in_20_bits_spill_nothing_and_are_another_program():
    (found,) = tune_short_sum.records((*SIZE[:3], 20), times(2.2, 2.4, 1.9)).values()
    assert found["program"] == "sum20 further" and found["best"]["spills"] == 0
